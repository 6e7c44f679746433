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

from bisect import bisect_right
from functools import partial
from itertools import accumulate, count
from random import Random
from typing import Final

from dualmap_sim.presets import TRACE_BLOCK_TOKENS
from dualmap_sim.workloads.draws import Deck, LogNormal, Quantiles
from dualmap_sim.workloads.statistics import (
    Asked,
    ideal_block_hit_rate,
    input_tokens_mean,
    output_tokens_mean,
    prefix_share,
    share_reusing,
)
from dualmap_sim.workloads.trace import Trace, TraceRequest
from dualmap_sim.workloads.traffic import Traffic, TrafficPart

BATCH_S: Final = 3.0
_REQUESTS_PER_S: Final = 23_608 / 3600
"""Mean rate of the original one-hour trace; ``Trace.at_rate`` scales it."""
_BURN_IN_S: Final = 600.0
"""Seconds that are generated first and dropped. So the trace begins during sessions, like a recorded trace."""
_SHARE_STRATA: Final = 1000
"""Draws per round for the source of the next request."""


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
    traffics = [Traffic(source, rng, blocks, sessions) for source in SOURCES]
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
