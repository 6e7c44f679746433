"""The default workload: a mix of multi-turn conversations and tool-calling agents, generated from a seed.

The workload's two halves have opposite demands on a router, like the DualMap paper's two traces (sections 4, A.2.1).
Conversations grow turn by turn, so that only the engine of the last turn can reuse the history. Agents begin with one
of a few long tool prefixes of very unequal popularity. So routing by prefix alone overloads an engine.
"""

import heapq
from bisect import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, count
from math import log
from random import Random
from typing import Final

from dualmap_sim.workloads.trace import Trace, TraceRequest

BLOCK_TOKENS: Final = 128
"""Length of a block of the default workload, equal to the router's default (``routing.prefix.blockTokens``)."""

_DECODE_S_PER_TOKEN: Final = 0.03
"""Assumed time per output token that a user or tool waits before the next turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionKind:
    """The parameters of one half of the mix. Lengths are log-normal: a median in tokens and the sigma ``spread``.

    The sessions share ``prefixes`` prefixes, such as system prompts or tool descriptions. ``prefix_blocks`` is the
    range of prefix lengths in blocks. Zipf's law with exponent ``prefix_skew`` gives the prefixes' popularity. A
    session continues after each turn with probability ``continues``, after a pause with mean ``pause_s``. A session
    also ends if its prompt exceeds ``context_tokens``.
    """

    sessions_per_s: float
    prefixes: int
    prefix_blocks: tuple[int, int]
    prefix_skew: float
    opening_tokens: float
    turn_tokens: float
    output_tokens: float
    spread: float
    continues: float
    pause_s: float
    context_tokens: int = 16_384


CONVERSATIONS: Final = SessionKind(
    sessions_per_s=0.7,
    prefixes=6,
    prefix_blocks=(2, 8),
    prefix_skew=0.8,
    opening_tokens=3000,
    turn_tokens=1000,
    output_tokens=110,
    spread=0.8,
    continues=0.72,
    pause_s=15.0,
)
"""Chat: short shared system prompts, a long opening (a document or file), then turns about the opening."""

AGENTS: Final = SessionKind(
    sessions_per_s=1.3,
    prefixes=24,
    prefix_blocks=(12, 40),
    prefix_skew=1.1,
    opening_tokens=2800,
    turn_tokens=1200,
    output_tokens=50,
    spread=0.8,
    continues=0.35,
    pause_s=3.0,
)
"""Tool use: long tool descriptions, some of them hot, then a few quick steps with tool results."""

_BURN_IN_S: Final = 240.0
"""Model seconds that are generated first and dropped, so that the trace begins with sessions of every age."""


def default_workload(requests: int, *, seed: int = 0) -> Trace:
    """Return ``requests`` requests of conversations and agents. Equal arguments give equal traces on any machine."""
    rng = Random(seed)
    blocks = count()
    kinds = [_Kind(kind, rng, blocks) for kind in (CONVERSATIONS, AGENTS)]
    kept: list[TraceRequest] = []
    for request in _merged(kinds, rng, blocks):
        if request.arrival_s >= _BURN_IN_S:
            kept.append(request)
        if len(kept) == requests:
            break
    return Trace(name="default", block_tokens=BLOCK_TOKENS, requests=tuple(kept))


class _Kind:
    """A SessionKind with its drawn prefixes."""

    def __init__(self, kind: SessionKind, rng: Random, blocks: Iterator[int]) -> None:
        self.kind = kind
        self._rng = rng
        shortest, longest = kind.prefix_blocks
        self._prefixes = [[next(blocks) for _ in range(rng.randint(shortest, longest))] for _ in range(kind.prefixes)]
        self._shares = list(accumulate(rank**-kind.prefix_skew for rank in range(1, kind.prefixes + 1)))

    def prefix(self) -> list[int]:
        """Draw a shared prefix according to its popularity."""
        return self._prefixes[bisect(self._shares, self._rng.random() * self._shares[-1])]

    def length(self, median_tokens: float) -> int:
        """Draw a length in tokens around the median."""
        return max(1, round(self._rng.lognormvariate(log(median_tokens), self.kind.spread)))


class _Session:
    """One conversation or agent task, with its growing prompt as block ids and a length."""

    def __init__(self, of: _Kind, *, number: int, blocks: Iterator[int]) -> None:
        self._of = of
        self._number = number
        self._unused = blocks
        self._blocks = list(of.prefix())
        self._tokens = len(self._blocks) * BLOCK_TOKENS
        self._turn = 0
        self._grow(of.length(of.kind.opening_tokens))

    def ask(self, arrival_s: float) -> TraceRequest:
        """Return the next turn, and append its answer and the next input to the history."""
        kind = self._of.kind
        request = TraceRequest(
            arrival_s=arrival_s,
            blocks=tuple(self._blocks),
            input_tokens=self._tokens,
            output_tokens=self._of.length(kind.output_tokens),
            session=self._number,
            turn=self._turn,
        )
        self._turn += 1
        self._grow(request.output_tokens + self._of.length(kind.turn_tokens))
        return request

    def next_arrival_s(self, last: TraceRequest, rng: Random) -> float | None:
        """Return the arrival time of the session's next turn, None if the session has ended."""
        kind = self._of.kind
        goes_on = rng.random() < kind.continues
        if not goes_on or self._tokens > kind.context_tokens:
            return None
        return last.arrival_s + last.output_tokens * _DECODE_S_PER_TOKEN + rng.expovariate(1 / kind.pause_s)

    def _grow(self, tokens: int) -> None:
        self._tokens += tokens
        while len(self._blocks) * BLOCK_TOKENS < self._tokens:
            self._blocks.append(next(self._unused))


def _merged(kinds: list[_Kind], rng: Random, blocks: Iterator[int]) -> Iterator[TraceRequest]:
    """Yield the requests of all sessions in order of arrival, without end. New sessions arrive as a Poisson process."""
    numbers = count()
    # (time, tie-breaker, the kind or session due then). A kind that is due begins a new session.
    agenda: list[tuple[float, int, _Kind | _Session]] = []
    for tie, kind in enumerate(kinds):
        heapq.heappush(agenda, (rng.expovariate(kind.kind.sessions_per_s), tie, kind))
    ties = count(len(kinds))
    while True:
        now_s, _, turn = heapq.heappop(agenda)
        if isinstance(turn, _Kind):
            later_s = now_s + rng.expovariate(turn.kind.sessions_per_s)
            heapq.heappush(agenda, (later_s, next(ties), turn))
            session = _Session(turn, number=next(numbers), blocks=blocks)
        else:
            session = turn
        request = session.ask(now_s)
        yield request
        next_s = session.next_arrival_s(request, rng)
        if next_s is not None:
            heapq.heappush(agenda, (next_s, next(ties), session))
