"""Traces: frozen requests with arrival times and prompts named by block ids, and the transformations of ALGORITHMS 7.

A prompt is a sequence of block ids: two prompts share a prefix exactly as long as their ids agree. Neighbours:
``synthetic`` and ``mooncake`` make traces, ``statistics`` measures them, ``text`` spells their prompts out.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Requests in order of arrival; ``block_tokens`` is the length of a full block."""

    name: str
    block_tokens: int
    requests: tuple[TraceRequest, ...]

    @property
    def duration_s(self) -> float:
        """Seconds from the first arrival to the last."""
        return self.requests[-1].arrival_s - self.requests[0].arrival_s

    def at_rate(self, requests_per_s: float) -> "Trace":
        """Return the trace starting at 0 with arrival times multiplied so that the mean rate is ``requests_per_s``.

        Bursts stay bursts. A trace whose requests all arrive at once has no rate to change and is returned as it is.
        """
        start_s, duration_s = self.requests[0].arrival_s, self.duration_s
        factor = len(self.requests) / requests_per_s / duration_s if duration_s > 0 else 1.0
        return self._with(replace(r, arrival_s=(r.arrival_s - start_s) * factor) for r in self.requests)

    def sped_up(self, factor: float) -> "Trace":
        """Return the trace with every arrival ``factor`` times as early."""
        return self._with(replace(r, arrival_s=r.arrival_s / factor) for r in self.requests)

    def capped(self, input_tokens_max: int) -> "Trace":
        """Return the trace with prompts cut to their first ``input_tokens_max`` tokens, as the paper does (A.2.1)."""
        blocks_max = -(-input_tokens_max // self.block_tokens)
        return self._with(
            replace(r, blocks=r.blocks[:blocks_max], input_tokens=min(r.input_tokens, input_tokens_max))
            for r in self.requests
        )

    def longer_than(self, input_tokens: int) -> int:
        """Return how many prompts have more than ``input_tokens``."""
        return sum(request.input_tokens > input_tokens for request in self.requests)

    def _with(self, requests: Iterable[TraceRequest]) -> "Trace":
        return replace(self, requests=tuple(requests))
