"""Prefixes with Zipf popularity and bursts: one cold prefix after another becomes hot for some seconds.

A router that lengthens the keys of hot prefixes must detect each burst while it lasts, and end the lengthening
afterwards. Every request has a prefix from a common set, and tokens of its own. There are no sessions. Times refer to
the nominal rate: ``Trace.at_rate`` stretches bursts with all other times. ``draws`` provides the random numbers, and
``statistics`` measures the result.
"""

from bisect import bisect
from collections import Counter
from functools import partial
from itertools import accumulate, count, islice
from random import Random
from typing import Final

from dualmap_sim.presets import TRACE_BLOCK_TOKENS
from dualmap_sim.workloads.draws import Deck, LogNormal
from dualmap_sim.workloads.statistics import Asked, arrival_cv, prefix_share
from dualmap_sim.workloads.trace import Trace, TraceRequest

PREFIXES: Final = 100
ZIPF_EXPONENT: Final = 0.9
_PREFIX_BLOCKS: Final = (4, 16)
_REQUESTS_PER_S: Final = 10.0

BURST_EVERY_S: Final = 40.0
BURST_S: Final = 20.0
"""The second half of every period is a burst."""
BURST_SHARE: Final = 0.45
"""Share of a burst's requests that have the burst's prefix, which is from the less popular half of the prefixes."""

_OWN: Final = LogNormal(median=1000, sigma=0.8)
_ANSWER: Final = LogNormal(median=120, sigma=0.7)
_STRATA: Final = 200

WINDOW_REQUESTS: Final = 50
"""The requests of five seconds at the nominal rate."""


def hottest_at_times(trace: Trace) -> float:
    """Return the upper quartile, over windows of WINDOW_REQUESTS, of the hottest prefix's share of a window."""
    firsts = [request.blocks[0] for request in trace.requests]
    windows = [firsts[start : start + WINDOW_REQUESTS] for start in range(0, len(firsts), WINDOW_REQUESTS)]
    shares = sorted(Counter(window).most_common(1)[0][1] / len(window) for window in windows)
    return shares[len(shares) * 3 // 4]


_WEIGHTS: Final = tuple(rank**-ZIPF_EXPONENT for rank in range(1, PREFIXES + 1))
_CALM_SHARE: Final = 1 - BURST_SHARE * BURST_S / BURST_EVERY_S

ASKED: Final = (
    Asked(
        "requests behind the hottest prefix", _CALM_SHARE * _WEIGHTS[0] / sum(_WEIGHTS), partial(prefix_share, rank=0)
    ),
    Asked(
        "requests behind the second prefix", _CALM_SHARE * _WEIGHTS[1] / sum(_WEIGHTS), partial(prefix_share, rank=1)
    ),
    Asked("requests behind one prefix in a burst", BURST_SHARE, hottest_at_times),
    Asked("coefficient of variation of arrivals", 1, arrival_cv),
)
"""The target figures, which follow from Zipf's law and the bursts."""


def zipf_bursts_workload(requests: int, *, seed: int = 0) -> Trace:
    """Return ``requests`` requests. Equal arguments give equal traces on any machine."""
    rng = Random(seed)
    blocks = count()
    lengths = Deck(rng, strata=_PREFIX_BLOCKS[1] + 1 - _PREFIX_BLOCKS[0])
    prefixes = [[next(blocks) for _ in range(_prefix_blocks(lengths))] for _ in range(PREFIXES)]
    burst_order = rng.sample(range(PREFIXES // 2, PREFIXES), PREFIXES - PREFIXES // 2)
    cumulated = list(accumulate(_WEIGHTS))
    ranks, in_burst, own, answers = (Deck(rng, strata=_STRATA) for _ in range(4))
    made = []
    now_s = 0.0
    for _ in range(requests):
        now_s += rng.expovariate(_REQUESTS_PER_S)
        period, into_s = divmod(now_s, BURST_EVERY_S)
        if into_s >= BURST_EVERY_S - BURST_S and in_burst.draw() < BURST_SHARE:
            prefix = prefixes[burst_order[int(period) % len(burst_order)]]
        else:
            prefix = prefixes[bisect(cumulated, ranks.draw() * cumulated[-1])]
        tokens = own.tokens(_OWN)
        made.append(
            TraceRequest(
                arrival_s=now_s,
                blocks=(*prefix, *islice(blocks, -(-tokens // TRACE_BLOCK_TOKENS))),
                input_tokens=len(prefix) * TRACE_BLOCK_TOKENS + tokens,
                output_tokens=answers.tokens(_ANSWER),
            )
        )
    return Trace(name="zipf_bursts", block_tokens=TRACE_BLOCK_TOKENS, requests=tuple(made))


def _prefix_blocks(lengths: Deck) -> int:
    shortest, longest = _PREFIX_BLOCKS
    return shortest + int(lengths.draw() * (longest + 1 - shortest))
