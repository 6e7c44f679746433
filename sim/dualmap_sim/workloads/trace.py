"""Traces: requests with arrival times and prompts as block ids; and how to scale, cut and window them.

A prompt is a sequence of block ids: two prompts share a prefix exactly as long as their ids agree. Neighbours:
the generators and ``mooncake`` make traces, ``statistics`` measures them, ``text`` spells their prompts out.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One request. Its prompt is ``blocks`` cut to ``input_tokens``: only the last block may be partial.

    A block's beginning does not depend on how much of it is used, so a conversation that goes on in the middle of a
    block keeps that block's id. ``session`` is None where the source does not say which requests belong together.
    """

    arrival_s: float
    blocks: tuple[int, ...]
    input_tokens: int
    output_tokens: int
    session: int | None = None
    turn: int = 0
    pause_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Requests in order of arrival; ``block_tokens`` is the length of a full block.

    In a closed loop only a session's first request in the trace arrives at its ``arrival_s``. Each later one arrives
    ``pause_s`` after the one before it in its session has ended, and its ``arrival_s`` is nominal: when it would come
    if the system took no time at all.
    """

    name: str
    block_tokens: int
    requests: tuple[TraceRequest, ...]
    closed_loop: bool = False

    @property
    def duration_s(self) -> float:
        """Seconds from the first arrival to the last."""
        return self.requests[-1].arrival_s - self.requests[0].arrival_s

    def at_rate(self, requests_per_s: float) -> "Trace":
        """Return the trace starting at 0 with arrival times multiplied so that the mean rate is ``requests_per_s``.

        Bursts stay bursts. A trace whose requests all arrive at once has no rate to change and is returned as it is.
        Of a closed loop the starts of sessions are multiplied, its pauses stay and the rate is the nominal one; with
        pauses too long for that rate, all sessions start at once.
        """
        start_s, needed_s = self.requests[0].arrival_s, len(self.requests) / requests_per_s
        factors = (
            (needed_s - (request.arrival_s - begun_s)) / (begun_s - start_s)
            for request, begun_s in zip(self.requests, self._begun_s(), strict=True)
            if begun_s > start_s
        )
        return self._rescaled(max(0.0, min(factors, default=1.0)), origin_s=start_s)

    def sped_up(self, factor: float) -> "Trace":
        """Return the trace with every arrival (of a closed loop: every session's start) ``factor`` times as early."""
        return self._rescaled(1 / factor, origin_s=0.0)

    def capped(self, input_tokens_max: int) -> "Trace":
        """Return the trace with prompts cut to their first ``input_tokens_max`` tokens, as the paper does (A.2.1)."""
        blocks_max = -(-input_tokens_max // self.block_tokens)
        return self._with(
            replace(r, blocks=r.blocks[:blocks_max], input_tokens=min(r.input_tokens, input_tokens_max))
            for r in self.requests
        )

    def without_sessions(self) -> "Trace":
        """Return the trace with requests that name no session."""
        return self._with(replace(r, session=None) for r in self.requests)

    def longer_than(self, input_tokens: int) -> int:
        """Return how many prompts have more than ``input_tokens``."""
        return sum(request.input_tokens > input_tokens for request in self.requests)

    def _begun_s(self) -> list[float]:
        """Return, per request, the arrival that its own hangs on: in a closed loop its session's first."""
        if not self.closed_loop:
            return [request.arrival_s for request in self.requests]
        firsts: dict[int, float] = {}
        return [
            request.arrival_s if request.session is None else firsts.setdefault(request.session, request.arrival_s)
            for request in self.requests
        ]

    def _rescaled(self, factor: float, *, origin_s: float) -> "Trace":
        moved = [
            replace(request, arrival_s=(begun_s - origin_s) * factor + (request.arrival_s - begun_s))
            for request, begun_s in zip(self.requests, self._begun_s(), strict=True)
        ]
        return self._with(sorted(moved, key=lambda request: request.arrival_s))

    def _with(self, requests: Iterable[TraceRequest]) -> "Trace":
        return replace(self, requests=tuple(requests))
