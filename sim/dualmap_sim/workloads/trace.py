"""Traces: requests with arrival times and prompts as block ids, and functions to change rates, prompts and sessions.

A prompt is a sequence of block ids. The common prefix of two prompts is exactly as long as their ids are equal. The
generators and ``mooncake`` make traces, ``statistics`` measures them, and ``text`` converts them to prompts.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One request. Its prompt is ``blocks`` cut to ``input_tokens``: only the last block may be partial.

    A partial block has the same id as the full block. So a conversation that continues within a block keeps the block's
    id. ``session`` is None if the source has no session ids.
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
    """Requests in order of arrival. ``block_tokens`` is the length of a full block.

    In a closed loop, only the first request of a session arrives at its ``arrival_s``. Each later request arrives
    ``pause_s`` after the end of the previous request of its session. The ``arrival_s`` of the later request is nominal:
    the arrival time on an infinitely fast system.
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
        """Return the trace from time 0, with arrival times scaled so that the mean rate is ``requests_per_s``.

        Bursts remain bursts. A trace with all requests at one time has no rate, and is returned unchanged. In a closed
        loop, only the starts of sessions are scaled, the pauses stay, and the rate is nominal. If the pauses are too
        long for the rate, all sessions start at once.
        """
        start_s, needed_s = self.requests[0].arrival_s, len(self.requests) / requests_per_s
        factors = (
            (needed_s - (request.arrival_s - begun_s)) / (begun_s - start_s)
            for request, begun_s in zip(self.requests, self._begun_s(), strict=True)
            if begun_s > start_s
        )
        return self._rescaled(max(0.0, min(factors, default=1.0)), origin_s=start_s)

    def sped_up(self, factor: float) -> "Trace":
        """Return the trace with all arrival times divided by ``factor``; in a closed loop, all starts of sessions."""
        return self._rescaled(1 / factor, origin_s=0.0)

    def capped(self, input_tokens_max: int) -> "Trace":
        """Return the trace with prompts cut to their first ``input_tokens_max`` tokens (DualMap paper, A.2.1)."""
        blocks_max = -(-input_tokens_max // self.block_tokens)
        return self._with(
            replace(r, blocks=r.blocks[:blocks_max], input_tokens=min(r.input_tokens, input_tokens_max))
            for r in self.requests
        )

    def without_sessions(self) -> "Trace":
        """Return the trace with requests that carry no session id."""
        return self._with(replace(r, session=None) for r in self.requests)

    def longer_than(self, input_tokens: int) -> int:
        """Return the number of prompts with more than ``input_tokens`` tokens."""
        return sum(request.input_tokens > input_tokens for request in self.requests)

    def _begun_s(self) -> list[float]:
        """Return the start of each request's session in a closed loop, otherwise the request's arrival."""
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
