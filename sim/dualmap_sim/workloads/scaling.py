"""Changes the rate of a trace by more or fewer sessions, while each session keeps its times and its own prompts.

A faster clock would also shorten the pauses within sessions, after which caches have lost less.
"""

from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Final

from xxhash import xxh3_64_intdigest

from dualmap_sim.workloads.sessions import label_sessions
from dualmap_sim.workloads.trace import Trace, TraceRequest

_LATER_MOST_S: Final = 60.0
"""A copy of a session begins up to this time after it, so that the rate over the day stays."""
_LATER_SHARE: Final = 0.1
"""... and up to this share of a short trace."""


def scaled_sessions(trace: Trace, factor: float) -> Trace:
    """Return the trace with ``factor`` times as many sessions; equal arguments give equal traces.

    A factor below 1 keeps a part of the sessions. A copy of a session has new blocks, except those that other sessions
    of the trace use as well, such as a system prompt. Requests without a session get those of ``label_sessions`` first.
    The result has no requests if the factor is too small for the trace.
    """
    assert not trace.closed_loop, "the answers of a closed loop decide when its requests arrive"
    labelled = label_sessions(trace)
    sessions = [
        f"own {own.session}" if own.session is not None else f"found {found.session}"
        for own, found in zip(trace.requests, labelled.requests, strict=True)
    ]
    shared = _shared_blocks(trace, sessions)
    later_s = min(_LATER_MOST_S, _LATER_SHARE * trace.duration_s)
    copied = [
        copy
        for request, session in zip(trace.requests, sessions, strict=True)
        for copy in _copies(request, session, shared, factor, later_s)
    ]
    return replace(trace, requests=tuple(sorted(copied, key=lambda request: request.arrival_s)))


def _copies(
    request: TraceRequest, session: str, shared: set[int], factor: float, later_s: float
) -> Iterator[TraceRequest]:
    """Yield a request once for each copy of its session."""
    draws = Random(session)
    count = int(factor) + (draws.random() < factor % 1)
    for number in range(count):
        if not number:
            yield request
            continue
        after_s = later_s * draws.random()
        yield replace(
            request,
            arrival_s=request.arrival_s + after_s,
            blocks=tuple(block if block in shared else _renamed(block, number) for block in request.blocks),
            session=None if request.session is None else _renamed(request.session, number),
        )


def _shared_blocks(trace: Trace, sessions: list[str]) -> set[int]:
    """Return the blocks that several sessions use."""
    owners: dict[int, str] = {}
    shared: set[int] = set()
    for request, session in zip(trace.requests, sessions, strict=True):
        for block in request.blocks:
            if owners.setdefault(block, session) != session:
                shared.add(block)
    return shared


def _renamed(name: int, copy: int) -> int:
    """Return another name for a block or a session in a copy."""
    return xxh3_64_intdigest(b"%d copy %d" % (name, copy))
