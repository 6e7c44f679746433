"""Changes a trace's rate over time, and repeats a trace that is too short.

The trace's bursts remain, because the module stretches time. ``trace`` defines the traces.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from math import cos, pi

from dualmap_sim.workloads.trace import Trace, TraceRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A number of seconds at a rate, as a multiple of the trace's own rate; 0 means no requests."""

    seconds: float
    rate: float


def wave(*, period_s: float, low: float, high: float, steps: int = 96) -> tuple[Phase, ...]:
    """Return the phases of one day: from the lowest rate to the highest and back, in small steps."""
    rates = (low + (high - low) * (1 - cos(2 * pi * (step + 0.5) / steps)) / 2 for step in range(steps))
    return tuple(Phase(seconds=period_s / steps, rate=rate) for rate in rates)


def paced(trace: Trace, phases: Sequence[Phase], *, start: int = 0) -> Trace:
    """Return the trace at the phases' rates, starting with request number ``start``, repeated as often as needed.

    Each repetition has new prompts, so that no request finds cached blocks of its earlier copy.
    """
    assert not trace.closed_loop, "how fast a closed loop comes is the system's business"
    again = _over_and_over(trace, start)
    requests: list[TraceRequest] = []
    request, (began_s, own_s) = next(again), (0.0, 0.0)
    for phase in phases:
        until_s = own_s + phase.seconds * phase.rate
        while request.arrival_s < until_s:
            at_s = began_s + (request.arrival_s - own_s) / phase.rate
            requests.append(replace(request, arrival_s=at_s))
            request = next(again)
        began_s, own_s = began_s + phase.seconds, until_s
    return replace(trace, requests=tuple(requests))


def _over_and_over(trace: Trace, start: int) -> Iterator[TraceRequest]:
    """Yield a trace's requests without end at the recorded rate, starting at time 0."""
    whole = trace.requests
    blocks = 1 + max(block for request in whole for block in request.blocks)
    # The pause between two repetitions is the mean pause between requests.
    lap_s = trace.duration_s * len(whole) / max(1, len(whole) - 1)
    for number in count(start):
        lap, place = divmod(number, len(whole))
        request = whole[place]
        yield replace(
            request,
            arrival_s=request.arrival_s - whole[start % len(whole)].arrival_s + (lap - start // len(whole)) * lap_s,
            blocks=tuple(block + lap * blocks for block in request.blocks),
            session=None,
        )
