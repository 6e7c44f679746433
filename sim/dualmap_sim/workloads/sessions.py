"""Finds sessions in a trace without session names: which requests are turns of one conversation, by their prompts.

Mooncake's traces have no sessions, although a chat client sends its whole history with every turn. Neighbours:
``mooncake`` reads such traces, ``catalog`` labels them.
"""

from dataclasses import replace

from dualmap_sim.workloads.trace import Trace


def label_sessions(trace: Trace) -> Trace:
    """Return the trace with sessions and turns: a prompt that holds a session's last one is that session's next turn.

    A prompt is known by its last full block, unless other sessions have that block too: then it is but the end of a
    common system prompt. Of two requests that both go on from one prompt, the first continues its session and the
    other begins one of its own.
    """
    ends: dict[int, tuple[int, int]] = {}
    owners: dict[int, int] = {}
    requests = []
    for number, request in enumerate(trace.requests):
        full = request.blocks[: request.input_tokens // trace.block_tokens]
        end = next((block for block in reversed(full) if block in ends), None)
        session, turn = (number, 0) if end is None else ends.pop(end)
        for block in full:
            if owners.setdefault(block, session) != session:
                ends.pop(block, None)
        if full and owners[full[-1]] == session:
            ends[full[-1]] = session, turn + 1
        requests.append(replace(request, session=session, turn=turn))
    return replace(trace, requests=tuple(requests))
