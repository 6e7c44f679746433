"""Chats about long documents with Poisson arrivals: each chat sends its growing history with every turn.

The Mooncake traces deliver requests in batches every three seconds. Here, requests arrive one by one, as a Poisson
process. Several routers then rarely decide at the same instant. A chat begins with a common system prompt and a
document of its own. Its prompts stay within a context of 20,480 tokens, so that no preset with this limit cuts them.

The sizes are assumptions. With them, eight ``7b`` engines behind one router serve about 5.6 requests per second within
the SLO, and reuse about 60 % of the prompt tokens. ``traffic`` makes the sessions, and ``statistics`` measures the
result.
"""

from itertools import count
from random import Random
from typing import Final

from dualmap_sim.presets import PRESETS, TRACE_BLOCK_TOKENS
from dualmap_sim.workloads.draws import LogNormal, Quantiles
from dualmap_sim.workloads.statistics import (
    Asked,
    arrival_cv,
    ideal_block_hit_rate,
    input_tokens_mean,
    output_tokens_mean,
    own_session_hit_rate,
    turns_mean,
)
from dualmap_sim.workloads.trace import Trace, TraceRequest
from dualmap_sim.workloads.traffic import Traffic, TrafficPart

_REQUESTS_PER_S: Final = 5.0
"""The nominal rate; ``Trace.at_rate`` scales it."""
_BURN_IN_S: Final = 600.0
"""Seconds that are generated first and dropped. So the trace begins during chats, like a recorded trace."""
_CONTINUES: Final = 0.77

CHATS: Final = TrafficPart(
    share=1.0,
    prefix_blocks=2,
    opening=Quantiles((0, 0.1, 0.5, 0.9, 1), (500, 2500, 7000, 16_000, 19_400)),
    answer=LogNormal(median=150, sigma=0.7),
    said=LogNormal(median=700, sigma=1.1),
    continues=(_CONTINUES, _CONTINUES, _CONTINUES),
    pause_s=LogNormal(median=60, sigma=0.9),
    context_tokens=PRESETS["7b"].input_tokens_max,
)

ASKED: Final = (
    Asked("input tokens, mean", 11_300, input_tokens_mean),
    Asked("output tokens, mean", 190, output_tokens_mean),
    Asked("requests per session, mean", 2.78, turns_mean),
    Asked("ideal hit rate, whole blocks", 0.625, ideal_block_hit_rate),
    Asked("ideal hit rate, each session by itself", 0.59, own_session_hit_rate),
    Asked("coefficient of variation of arrivals", 1, arrival_cv),
)
"""The target figures of the first 4000 requests, which contain only parts of the longest chats."""


def poisson_chats_workload(requests: int, *, seed: int = 0) -> Trace:
    """Return ``requests`` requests. Equal arguments give equal traces on any machine."""
    rng = Random(seed)
    chats = Traffic(CHATS, rng, count(), count())
    kept: list[TraceRequest] = []
    now_s = 0.0
    while len(kept) < requests:
        now_s += rng.expovariate(_REQUESTS_PER_S)
        request = chats.ask(now_s)
        if now_s >= _BURN_IN_S:
            kept.append(request)
    return Trace(name="poisson_chats", block_tokens=TRACE_BLOCK_TOKENS, requests=tuple(kept))
