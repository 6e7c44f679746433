"""The paper's Tool&Agent workload rebuilt: two hot tool prompts with their agents, and conversations for the rest.

The trace itself is not at hand; its statistics are (paper sections A.1.1, A.2.1 Table 1, A.4). Two tool prompts carry
37.8 % and 14.9 % of the requests. The first lines of the trace, which its publishers show, have twelve or five common
blocks, a short question of the agent and a very short answer. The other requests look like those of the Conversation
trace, whose lengths, pauses and answers are taken over here. How often conversations go on and by what their lengths
are scaled is fitted, so that the first 8000 requests, before any cap on the input, have what the paper says. Requests
arrive in batches every three seconds, as Mooncake's do, at a steady rate. Neighbours:
``draws`` for the numbers, ``statistics`` for what came out.

Deviation: 2.1 % of the paper's requests have a key of a fourth length, of which it says nothing; they count as rest.
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
"""Mean rate of the whole trace, which lasts an hour; ``Trace.at_rate`` scales it."""
_BURN_IN_S: Final = 600.0
"""Seconds generated and dropped first, so that the trace begins in the middle of sessions as a recorded one does."""
_CONTEXT_TOKENS: Final = 128_000
"""A session whose next prompt would be longer ends; the longest prompt of the Conversation trace has 126,195."""
PROMPT_BANDS: Final = (8000, 32_000)
"""Short, middling and long prompts: those of the Conversation trace go on the less often the longer they are."""
_STRATA: Final = 250
_TURN_STRATA: Final = 20
_SHARE_STRATA: Final = 1000
"""Rounds of draws: of lengths, of whether a session goes on, of which source is next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficPart:
    """One part of the traffic: ``share`` of the requests (0 to 1), all beginning with the same ``prefix_blocks``.

    Lengths in tokens: ``opening`` is what a session adds to the prefix, ``answer`` an answer, ``said`` the input of
    each further turn. A session goes on after a request with probability ``continues``, one for each of the
    PROMPT_BANDS,
    ``pause_s`` seconds after it arrived.
    """

    share: float
    prefix_blocks: int
    opening: Distribution
    answer: Distribution
    said: Distribution
    continues: tuple[float, float, float]
    pause_s: Distribution


_LEVELS: Final = (0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 1)
# The Conversation trace's, its sessions labelled as ``sessions`` does; openings without the block that all share.
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
"""The hottest tool: 6144 tokens in common, then what one call needs."""

SHORT_TOOL: Final = TrafficPart(
    share=0.149,
    prefix_blocks=5,
    opening=LogNormal(median=560, sigma=0.4),
    answer=LogNormal(median=20, sigma=0.5),
    said=LogNormal(median=300, sigma=0.8),
    continues=(0.25, 0.25, 0.25),
    pause_s=LogNormal(median=9, sigma=1.0),
)
"""The second tool: 2560 tokens in common."""

CONVERSATIONS: Final = TrafficPart(
    share=0.473,
    prefix_blocks=1,
    opening=_OPENINGS.scaled(1.15),
    answer=_ANSWERS.scaled(1.046),
    said=_SAID.scaled(0.94),
    continues=(0.785, 0.46, 0.4),
    pause_s=_PAUSES_S,
)
"""The rest, which shares one block of system prompt: lengths and pauses by the Conversation trace's quantiles.

Conversations go on more often than in that trace, or else fewer than 76 % of the requests would share half a prompt.
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
"""What the paper says of the trace's first 8000 requests."""


def tool_agent_workload(requests: int, *, seed: int = 0) -> Trace:
    """Return ``requests`` requests of the rebuilt trace. Equal arguments give equal traces, everywhere."""
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
    """One agent or conversation: its growing prompt, as block ids and a length."""

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
    """The sessions of one source. A request is the next turn of the session that waits longest, else of a new one."""

    def __init__(self, source: TrafficPart, rng: Random, blocks: Iterator[int], sessions: Iterator[int]) -> None:
        self._source = source
        self._blocks = blocks
        self._sessions = sessions
        self._prefix = [next(blocks) for _ in range(source.prefix_blocks)]
        self._openings, self._answers, self._said, self._pauses = (Deck(rng, strata=_STRATA) for _ in range(4))
        self._goes_on = [Deck(rng, strata=_TURN_STRATA) for _ in source.continues]
        # (when its next turn is due, its number, the session)
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
