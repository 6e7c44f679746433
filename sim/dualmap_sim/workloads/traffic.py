"""Sessions whose prompts grow turn by turn, and the requests of a part of a workload's traffic.

A request continues the session whose next turn is due, or begins a session. The generators decide when requests arrive,
so the rate does not depend on the sessions. ``draws`` provides the random numbers.
"""

import heapq
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Final

from dualmap_sim.presets import TRACE_BLOCK_TOKENS
from dualmap_sim.workloads.draws import Deck, Distribution
from dualmap_sim.workloads.trace import TraceRequest

PROMPT_BANDS: Final = (8000, 32_000)
"""Bounds between short, medium and long prompts. In the Conversation trace, longer prompts continue less often."""
_STRATA: Final = 250
_TURN_STRATA: Final = 20
"""Draws per round: for lengths, and for whether a session continues."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficPart:
    """One part of the traffic: ``share`` of the requests (0 to 1), which all begin with the same ``prefix_blocks``.

    Lengths are in tokens. ``opening`` is the first input after the prefix, and ``said`` the input of each further turn.
    ``answer`` is the length of an answer. ``continues`` is the probability that a session continues after a request,
    for each of the PROMPT_BANDS. The session's next request arrives ``pause_s`` seconds after the last request.
    """

    share: float
    prefix_blocks: int
    opening: Distribution
    answer: Distribution
    said: Distribution
    continues: tuple[float, float, float]
    pause_s: Distribution
    context_tokens: int = 128_000
    """A session ends if its next prompt would be longer. The longest in the Conversation trace has 126,195 tokens."""


class _Session:
    """One agent or conversation, with its growing prompt as block ids and a length."""

    def __init__(self, number: int, prefix: list[int]) -> None:
        self.number = number
        self.blocks = list(prefix)
        self.tokens = len(prefix) * TRACE_BLOCK_TOKENS
        self.turn = 0

    def grow(self, tokens: int, unused: Iterator[int]) -> None:
        self.tokens += tokens
        while len(self.blocks) * TRACE_BLOCK_TOKENS < self.tokens:
            self.blocks.append(next(unused))


class Traffic:
    """The sessions of one source. A request continues the session that is due first, or begins a new session."""

    def __init__(self, source: TrafficPart, rng: Random, blocks: Iterator[int], sessions: Iterator[int]) -> None:
        self._source = source
        self._blocks = blocks
        self._sessions = sessions
        self._prefix = [next(blocks) for _ in range(source.prefix_blocks)]
        self._openings, self._answers, self._said, self._pauses = (Deck(rng, strata=_STRATA) for _ in range(4))
        self._goes_on = [Deck(rng, strata=_TURN_STRATA) for _ in source.continues]
        # (time of the next turn, session number, session)
        self._waiting: list[tuple[float, int, _Session]] = []

    def ask(self, now_s: float) -> TraceRequest:
        """Return the source's next request."""
        if self._waiting and self._waiting[0][0] <= now_s:
            session = heapq.heappop(self._waiting)[2]
        else:
            session = _Session(next(self._sessions), self._prefix)
            session.grow(self._openings.tokens(self._source.opening), self._blocks)
        request = TraceRequest(
            arrival_s=now_s,
            blocks=tuple(session.blocks),
            input_tokens=session.tokens,
            output_tokens=self._answers.tokens(self._source.answer),
            session=session.number,
            turn=session.turn,
        )
        self._continue(session, request)
        return request

    def _continue(self, session: _Session, last: TraceRequest) -> None:
        added = last.output_tokens + self._said.tokens(self._source.said)
        band = bisect_right(PROMPT_BANDS, session.tokens)
        ends = self._goes_on[band].draw() >= self._source.continues[band]
        if ends or session.tokens + added > self._source.context_tokens:
            return
        session.turn += 1
        session.grow(added, self._blocks)
        due_s = last.arrival_s + self._source.pause_s.at(self._pauses.draw())
        heapq.heappush(self._waiting, (due_s, session.number, session))
