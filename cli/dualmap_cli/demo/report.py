"""Computes each policy's figures from the outcomes of its requests.

The definitions are those of the DualMap paper, section 5.1. Times are model seconds (see ``plan``) unless the name
contains ``wall``. ``printing`` and ``chart`` show the figures.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Final

from dualmap.pools.pool import Routing
from dualmap_cli.demo.plan import SLO_TTFT_S, Plan
from dualmap_cli.demo.predictions import EventCounts
from dualmap_cli.demo.replay import Outcome
from dualmap_cli.demo.sampling import LoadSample

_BLOCK_TOKENS: Final = Routing().prefix.block_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRun:
    """The measurements of one policy's run."""

    policy: str
    outcomes: tuple[Outcome, ...]
    samples: tuple[LoadSample, ...]
    wall_s: float
    events: EventCounts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionReport:
    """How far the routers' predictions of cached tokens were right, over the requests that a router picked.

    ``as_predicted`` is the share of requests whose cached tokens differ by at most one block of the pool.
    ``stale_hits`` are the requests with predicted tokens of which the engine had none cached. ``from_events`` is the
    share of requests that were picked by what engines report. ``events`` is None in runs that do not use KV events.
    """

    as_predicted: float
    predicted_hits: int
    stale_hits: int
    from_events: float
    events: EventCounts | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyReport:
    """One policy's figures. Percentiles cover the successful requests; they are None without such requests.

    ``slo_attainment`` covers all requests: a failed request counts as a miss. ``pending_cv`` is the paper's equation 1,
    averaged over the samples with pending tokens. ``pending_cv`` is None without such samples. ``predictions`` is None
    in a demo without KV events.
    """

    policy: str
    qps: float
    instances: int
    requests: int
    ttft_p50_s: float | None
    ttft_p90_s: float | None
    ttft_p99_s: float | None
    e2e_p50_s: float | None
    e2e_p90_s: float | None
    slo_attainment: float
    hit_rate: float
    pending_cv: float | None
    pending_tokens_mean: float | None
    errors: dict[str, int]
    send_lag_p99_wall_s: float
    send_lag_max_wall_s: float
    wall_s: float
    predictions: PredictionReport | None = None


def percentile(values: Sequence[float], share: float) -> float | None:
    """Return the nearest-rank percentile: the lowest value that ``share`` of the values do not exceed, or None."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def coefficient_of_variation(sample: LoadSample) -> float | None:
    """Return standard deviation over mean of the endpoints' pending tokens (equation 1); None if all are zero."""
    mean = fmean(sample.pending_tokens)
    return pstdev(sample.pending_tokens) / mean if mean > 0 else None


def ttfts_s(run: PolicyRun, *, speed: float) -> list[tuple[float, float]]:
    """Return (due time, TTFT) of each successful request, in model seconds."""
    return [
        (outcome.due_s * speed, (outcome.first_byte_s - outcome.sent_s) * speed)
        for outcome in run.outcomes
        if outcome.error is None and outcome.first_byte_s is not None
    ]


def report(run: PolicyRun, plan: Plan) -> PolicyReport:
    """Return the figures of one run."""
    succeeded = [outcome for outcome in run.outcomes if outcome.error is None]
    ttfts = [ttft_s for _, ttft_s in ttfts_s(run, speed=plan.speed)]
    e2es = [(outcome.finished_s - outcome.sent_s) * plan.speed for outcome in succeeded]
    lags = [outcome.sent_s - outcome.due_s for outcome in run.outcomes]
    cvs = [cv for cv in map(coefficient_of_variation, run.samples) if cv is not None]
    prompt_tokens = sum(outcome.prompt_tokens for outcome in succeeded)
    return PolicyReport(
        policy=run.policy,
        qps=plan.rate,
        instances=plan.engines,
        requests=len(run.outcomes),
        ttft_p50_s=percentile(ttfts, 0.50),
        ttft_p90_s=percentile(ttfts, 0.90),
        ttft_p99_s=percentile(ttfts, 0.99),
        e2e_p50_s=percentile(e2es, 0.50),
        e2e_p90_s=percentile(e2es, 0.90),
        slo_attainment=sum(ttft_s <= SLO_TTFT_S for ttft_s in ttfts) / len(run.outcomes),
        hit_rate=sum(o.cached_tokens for o in succeeded) / prompt_tokens if prompt_tokens else 0.0,
        pending_cv=fmean(cvs) if cvs else None,
        pending_tokens_mean=fmean([fmean(s.pending_tokens) for s in run.samples]) if run.samples else None,
        errors=dict(Counter(outcome.error for outcome in run.outcomes if outcome.error is not None)),
        send_lag_p99_wall_s=percentile(lags, 0.99) or 0.0,
        send_lag_max_wall_s=max(lags),
        wall_s=run.wall_s,
        predictions=_predictions(run) if plan.kv_events else None,
    )


def _predictions(run: PolicyRun) -> PredictionReport | None:
    picked = [(each.prediction, each) for each in run.outcomes if each.error is None and each.prediction is not None]
    if not picked:
        return None
    pairs = [(prediction.cached_share * each.prompt_tokens, each.cached_tokens) for prediction, each in picked]
    hits = [cached for predicted, cached in pairs if predicted > 0]
    return PredictionReport(
        as_predicted=sum(abs(predicted - cached) <= _BLOCK_TOKENS for predicted, cached in pairs) / len(pairs),
        predicted_hits=len(hits),
        stale_hits=sum(not cached for cached in hits),
        from_events=sum(prediction.from_events for prediction, _ in picked) / len(picked),
        events=run.events,
    )
