"""A reconstruction of the DualMap paper's Tool&Agent workload: two hot tool prompts with agents, and conversations.

The trace itself is not available, but its statistics are (paper sections A.1.1, A.2.1 Table 1, A.4). Two tool prompts
start 37.8 % and 14.9 % of the requests. The publishers of the trace show its first lines. The requests in these lines
have twelve or five common blocks, a short question of the agent and a very short answer. The other requests resemble
the Conversation trace, so this module uses that trace's lengths, pauses and answers. The probability that a
conversation continues and the scale of its lengths are fitted. With these values, the first 8000 requests match the
paper's statistics before prompts are cut. Requests arrive in batches every three seconds at a steady rate, as in
Mooncake's traces. ``draws`` provides the random numbers, and ``statistics`` measures the result.

Deviation: 2.1 % of the paper's requests have a key of a fourth length that the paper does not describe. Here they count
as conversations.
"""

import heapq
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, count
from random import Random
from typing import Final

from dualmap_sim.presets import TRACE_BLOCK_TOKENS
from dualmap_sim.workloads.draws import Deck, Distribution, LogNormal, Quantiles
from dualmap_sim.workloads.statistics import (
    Asked,
    ideal_block_hit_rate,
    input_tokens_mean,
    output_tokens_mean,
    prefix_share,
    share_reusing,
)
from dualmap_sim.workloads.trace import Trace, TraceRequest

BATCH_S: Final = 3.0
_REQUESTS_PER_S: Final = 23_608 / 3600
"""Mean rate of the original one-hour trace; ``Trace.at_rate`` scales it."""
_BURN_IN_S: Final = 600.0
"""Seconds that are generated first and dropped. So the trace begins during sessions, like a recorded trace."""
_CONTEXT_TOKENS: Final = 128_000
"""A session ends if its next prompt would be longer. The longest in the Conversation trace has 126,195 tokens."""
PROMPT_BANDS: Final = (8000, 32_000)
"""Bounds between short, medium and long prompts. In the Conversation trace, longer prompts continue less often."""
_STRATA: Final = 250
_TURN_STRATA: Final = 20
_SHARE_STRATA: Final = 1000
"""Draws per round: for lengths, for whether a session continues, and for the source of the next request."""


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


_LEVELS: Final = (0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 1)
# The Conversation trace's quantiles, with the sessions that ``sessions`` finds. Openings exclude the common first
# block.
_OPENINGS: Final = Quantiles(
    _LEVELS,
    (379, 386, 395, 651, 1635, 3872, 5450, 8082, 11_637, 16_521, 26_033, 38_368, 66_700, 86_660, 108_697, 125_683),
)
_ANSWERS: Final = Quantiles(_LEVELS, (1, 10, 24, 100, 213, 291, 350, 399, 447, 504, 597, 698, 893, 1120, 1570, 2000))
_SAID: Final = Quantiles(_LEVELS, (1, 1, 1, 8, 11, 16, 26, 53, 177, 698, 4203, 6921, 11_742, 16_705, 22_478, 91_467))
_PAUSES_S: Final = Quantiles(_LEVELS, (6, 27, 42, 57, 75, 96, 123, 162, 225, 318, 474, 606, 987, 1458, 1914, 3030))

LONG_TOOL: Final = TrafficPart(
    share=0.378,
    prefix_blocks=12,
    opening=LogNormal(median=360, sigma=1.1),
    answer=LogNormal(median=12, sigma=1.1),
    said=LogNormal(median=300, sigma=0.8),
    continues=(0.25, 0.25, 0.25),
    pause_s=LogNormal(median=9, sigma=1.0),
)
"""The hottest tool: 6144 common tokens, then the input of one call."""

SHORT_TOOL: Final = TrafficPart(
    share=0.149,
    prefix_blocks=5,
    opening=LogNormal(median=560, sigma=0.4),
    answer=LogNormal(median=20, sigma=0.5),
    said=LogNormal(median=300, sigma=0.8),
    continues=(0.25, 0.25, 0.25),
    pause_s=LogNormal(median=9, sigma=1.0),
)
"""The second tool: 2560 common tokens."""

CONVERSATIONS: Final = TrafficPart(
    share=0.473,
    prefix_blocks=1,
    opening=_OPENINGS.scaled(1.15),
    answer=_ANSWERS.scaled(1.046),
    said=_SAID.scaled(0.94),
    continues=(0.785, 0.46, 0.4),
    pause_s=_PAUSES_S,
)
"""All other requests, which share one block of system prompt. Lengths and pauses follow the Conversation trace.

Conversations continue more often than in that trace. Otherwise fewer than 76 % of the requests would share half their
prompt.
"""

SOURCES: Final = (LONG_TOOL, SHORT_TOOL, CONVERSATIONS)

ASKED: Final = (
    Asked("input tokens, mean", 8596, input_tokens_mean),
    Asked("output tokens, mean", 182, output_tokens_mean),
    Asked("ideal hit rate, whole blocks", 0.59, ideal_block_hit_rate),
    Asked("requests behind the longer hot prefix", 0.378, partial(prefix_share, blocks=12, rank=0)),
    Asked("requests behind the shorter hot prefix", 0.149, partial(prefix_share, blocks=5, rank=1)),
    Asked("requests that share half their prompt", 0.76, partial(share_reusing, least=0.5)),
)
"""The paper's statistics of the trace's first 8000 requests."""


def tool_agent_workload(requests: int, *, seed: int = 0) -> Trace:
    """Return ``requests`` requests of the reconstructed trace. Equal arguments give equal traces on any machine."""
    rng = Random(seed)
    blocks, sessions = count(), count()
    traffics = [_Traffic(source, rng, blocks, sessions) for source in SOURCES]
    sources, cumulated = Deck(rng, strata=_SHARE_STRATA), list(accumulate(source.share for source in SOURCES))
    kept: list[TraceRequest] = []
    now_s = 0.0
    while len(kept) < requests:
        now_s += rng.expovariate(_REQUESTS_PER_S)
        traffic = traffics[bisect_right(cumulated, sources.draw() * cumulated[-1])]
        request = traffic.ask(now_s // BATCH_S * BATCH_S)
        if now_s >= _BURN_IN_S:
            kept.append(request)
    return Trace(name="tool_agent", block_tokens=TRACE_BLOCK_TOKENS, requests=tuple(kept))


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


class _Traffic:
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
        if ends or session.tokens + added > _CONTEXT_TOKENS:
            return
        session.turn += 1
        session.grow(added, self._blocks)
        due_s = last.arrival_s + self._source.pause_s.at(self._pauses.draw())
        heapq.heappush(self._waiting, (due_s, session.number, session))
