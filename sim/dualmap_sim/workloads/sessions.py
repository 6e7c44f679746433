"""Finds the sessions of a trace without session ids: the prompts show which requests are turns of one conversation.

Mooncake's traces have no session ids, but a chat client sends its full history with every turn. ``mooncake`` reads such
traces, and ``catalog`` adds the sessions.
"""

from dataclasses import replace

from dualmap_sim.workloads.trace import Trace


def label_sessions(trace: Trace) -> Trace:
    """Return the trace with sessions and turns. A prompt that contains a session's last prompt is its next turn.

    The last full block identifies a prompt, unless other sessions also have the block. A block of several sessions is
    the end of a common system prompt. If two requests continue the same prompt, the first continues its session, and
    the second begins a new session.
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
