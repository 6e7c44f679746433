"""Runs one simulated cluster and computes its figures."""

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from math import nan
from statistics import fmean
from typing import Final

from bench.truth.cases import BLOCK_TOKENS, Run, cluster_of
from bench.virtual import SLO_TTFT_S

from dualmap_sim.cluster import Cluster
from dualmap_sim.records import Record
from dualmap_sim.summary import summarise

WARMUP: Final = 0.25
"""The first part of a run's requests, which does not count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The figures of a run; shares are from 0 to 1, and times are in seconds.

    ``hit_rate`` is measured by the engines. ``stale_rate`` covers the requests with at least one predicted block: the
    share whose engine had cached nothing. ``excess`` is the share of all predicted tokens that the engine had not
    cached. ``off`` is the share of requests whose prediction is wrong by more than a block of the router, ``off_fine``
    by more than a block of the engine. ``within_slo`` covers all requests: a failed or rejected request counts as a
    miss. The other figures cover the served requests.
    """

    hit_rate: float
    stale_rate: float
    excess: float
    off: float
    off_fine: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_mean_s: float
    within_slo: float
    failed: int
    rejected: int


def measure(run: Run) -> Figures:
    """Simulate a run and return its figures without the warm-up."""
    gc.collect()
    config, asked = cluster_of(run)
    records = Cluster(config).run(asked)
    block_tokens = config.pool.routing.prefix.block_tokens
    return figures(records[int(WARMUP * len(records)) :], block_tokens=block_tokens)


def figures(records: Sequence[Record], *, block_tokens: int) -> Figures:
    """Return the figures of some requests; ``block_tokens`` is the router's block."""
    summary = summarise(records, slo_ttft_s=SLO_TTFT_S)
    served = [record for record in records if record.finished_s is not None]
    pairs = [(each.predicted_tokens, each.cached_tokens) for each in served if each.predicted_tokens is not None]
    predicted = sum(expected for expected, _ in pairs)
    return Figures(
        hit_rate=summary.hit_rate,
        stale_rate=summary.stale_rate,
        excess=sum(max(0, expected - cached) for expected, cached in pairs) / predicted if predicted else nan,
        off=_off(pairs, block_tokens),
        off_fine=_off(pairs, BLOCK_TOKENS),
        ttft_p50_s=summary.ttft_p50_s,
        ttft_p90_s=summary.ttft_p90_s,
        ttft_mean_s=fmean([each.ttft_s for each in served if each.ttft_s is not None] or [nan]),
        within_slo=summary.slo_attainment,
        failed=summary.failed,
        rejected=summary.refused,
    )


def _off(pairs: Sequence[tuple[int, int]], tokens: int) -> float:
    return sum(abs(expected - cached) > tokens for expected, cached in pairs) / len(pairs) if pairs else nan
