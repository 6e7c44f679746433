"""Computes the figures of a run: TTFT percentiles, SLO attainment, hit rate (DualMap paper, section 5.1)."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, nan, sqrt

from dualmap_sim.records import LoadSample, Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Figures over some of a run's requests. Shares are from 0 to 1.

    TTFT, E2E (arrival to last token) and hit rate cover the served requests. A rejected or failed request counts as an
    SLO miss. ``pending_cv`` measures how unevenly pending prompt tokens are distributed over the members.
    ``pending_cv`` is the standard deviation over the mean, averaged over all samples with pending tokens.
    ``stale_rate`` covers the requests with predicted cached tokens: the share whose engine had cached none. ``rules``
    counts the requests sent by each of the policy's rules.
    """

    requests: int
    refused: int
    failed: int
    slo_attainment: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    ttft_p999_s: float
    e2e_p50_s: float
    e2e_p90_s: float
    hit_rate: float
    stale_rate: float
    pending_cv: float
    held_share: float
    rules: Mapping[str, int]


def summarise(records: Sequence[Record], *, slo_ttft_s: float, samples: Sequence[LoadSample] = ()) -> Summary:
    """Return the figures of at least one ended request. A figure without data (served requests, samples) is NaN."""
    served = [record for record in records if record.finished_s is not None]
    ttft_s = sorted(record.ttft_s for record in served if record.ttft_s is not None)
    e2e_s = sorted(r.finished_s - r.arrival.at_s for r in served if r.finished_s is not None)
    expected = [record for record in served if record.predicted_hit]
    prompt_tokens = sum(record.arrival.work.prompt_tokens for record in served)
    return Summary(
        requests=len(records),
        refused=sum(record.refused is not None for record in records),
        failed=sum(record.failed for record in records),
        slo_attainment=sum(each <= slo_ttft_s for each in ttft_s) / len(records),
        ttft_p50_s=percentile(ttft_s, 0.5),
        ttft_p90_s=percentile(ttft_s, 0.9),
        ttft_p99_s=percentile(ttft_s, 0.99),
        ttft_p999_s=percentile(ttft_s, 0.999),
        e2e_p50_s=percentile(e2e_s, 0.5),
        e2e_p90_s=percentile(e2e_s, 0.9),
        hit_rate=sum(record.cached_tokens for record in served) / prompt_tokens if prompt_tokens else nan,
        stale_rate=sum(record.stale_hit for record in expected) / len(expected) if expected else nan,
        pending_cv=_pending_cv(samples),
        held_share=sum(record.held for record in records) / len(records),
        rules=Counter(record.rule for record in served if record.rule is not None),
    )


def _pending_cv(samples: Sequence[LoadSample]) -> float:
    cvs = []
    for sample in samples:
        tokens = sample.pending_tokens.values()
        if any(tokens):
            mean = sum(tokens) / len(tokens)
            cvs.append(sqrt(sum((each - mean) ** 2 for each in tokens) / len(tokens)) / mean)
    return sum(cvs) / len(cvs) if cvs else nan


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the lowest sorted value that at least ``share`` of the values do not exceed; NaN without values."""
    return ordered[max(0, ceil(share * len(ordered)) - 1)] if ordered else nan
