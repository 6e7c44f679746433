"""The figures of an autoscaled run: cost, SLO attainment, delay in following the load, and stability.

``loop`` makes the runs, ``summary`` computes the figures over requests, and ``bench/autoscaling`` shows the results.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from dualmap_sim.autoscaling.loop import Run, Sync
from dualmap_sim.records import Record
from dualmap_sim.summary import Summary, summarise

_MINUTE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Lag:
    """Seconds from a rise in load until enough replicas were requested, and until enough served; None if never."""

    asked_s: float | None
    serving_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Figures of a run after its warm-up, except that ``instance_hours`` cover the full run.

    ``instance_hours`` include pods that start or drain. ``changes`` counts changes of the requested replicas. ``turns``
    counts switches between growing and shrinking. ``worst_minute`` is the lowest attainment of any minute. ``cut``
    counts requests whose pod was deleted before they ended.
    """

    summary: Summary
    worst_minute: float
    instance_hours: float
    replicas_mean: float
    replicas_max: int
    changes: int
    turns: int
    cut: int


def figures(run: Run, *, slo_ttft_s: float, warmup_s: float) -> Figures:
    """Measure a run. Requests of the first ``warmup_s`` count for the cost, but not for the attainment."""
    counted = [record for record in run.records if record.arrival.at_s >= warmup_s]
    lifetimes_s = [(run.ended_s if pod.gone_s is None else pod.gone_s) - pod.created_s for pod in run.pods]
    syncs = [sync for sync in run.syncs if sync.at_s >= warmup_s]
    steps = [
        later.requested - earlier.requested
        for earlier, later in pairwise(syncs)
        if later.requested != earlier.requested
    ]
    return Figures(
        summary=summarise(counted, slo_ttft_s=slo_ttft_s),
        worst_minute=min(share for _, share in attainment(counted, slo_ttft_s=slo_ttft_s)),
        instance_hours=sum(lifetimes_s) / 3600,
        replicas_mean=sum(lifetimes_s) / run.ended_s,
        replicas_max=max(sync.present for sync in run.syncs),
        changes=len(steps),
        turns=sum((one > 0) != (other > 0) for one, other in pairwise(steps)),
        cut=_cut(run),
    )


def attainment(
    records: Sequence[Record], *, slo_ttft_s: float, every_s: float = _MINUTE_S
) -> list[tuple[float, float]]:
    """Return the share of requests within the SLO per span of arrival time, without the spans that have no request."""
    met: dict[int, list[bool]] = {}
    for record in records:
        in_time = record.ttft_s is not None and record.ttft_s <= slo_ttft_s
        met.setdefault(int(record.arrival.at_s / every_s), []).append(in_time)
    return [(span * every_s, sum(each) / len(each)) for span, each in sorted(met.items())]


def lag(syncs: Sequence[Sync], *, since_s: float, enough: int) -> Lag:
    """Return the seconds from ``since_s`` until ``enough`` instances were requested, and until ``enough`` served."""
    later = [sync for sync in syncs if sync.at_s >= since_s]
    return Lag(
        asked_s=next((sync.at_s - since_s for sync in later if sync.requested >= enough), None),
        serving_s=next((sync.at_s - since_s for sync in later if sync.serving >= enough), None),
    )


def _cut(run: Run) -> int:
    gone_s = {pod.endpoint: pod.gone_s for pod in run.pods if pod.gone_s is not None}
    return sum(
        record.finished_s is None or record.finished_s > gone_s[record.endpoint]
        for record in run.records
        if record.endpoint in gone_s
    )
