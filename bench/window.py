"""Measures the dispatch window: the prefill that may wait at an instance before the router queues further requests.

Every window runs under both DualMap policies at two loads near the maximum. Some windows also run without rebalancing.
Further tables show the other order of queued requests. The last tables show late feedback and several routers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import inf

import click
from bench.virtual import QUICK_REQUESTS, REQUESTS, Case, measure, percent, run_all, seconds, workloads

from dualmap.pools.pool import Queue, Rebalance, Routing
from dualmap.queue.rebalance import REBALANCED
from dualmap_sim.cluster import Replica, ReplicationConfig
from dualmap_sim.summary import Summary

WINDOWS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, inf)
RATES = {"conversation": (3.1, 3.4), "default": (9.0, 9.75)}
POLICIES = ("dualmap", "dualmap_paper")
ORDERED_WINDOWS_S = (0.25, 1.0)
DELAYED_WINDOWS_S = (0.1, 0.25, 1.0, inf)
DELAYS_S = (0.0, 0.02)
COLUMNS = "TTFT p50 s | p90 s | p99 s | within SLO % | hit rate % | held % | migrated % | refused %"


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """The extent of a measurement: samples, requests, windows and rates."""

    samples: Sequence[int] = (0, 1, 2)
    requests: int = REQUESTS
    windows_s: Sequence[float] = WINDOWS_S
    ordered_windows_s: Sequence[float] = ORDERED_WINDOWS_S
    delayed_windows_s: Sequence[float] = DELAYED_WINDOWS_S
    rates: Mapping[str, Sequence[float]] = field(default_factory=lambda: RATES)


FULL = {
    "conversation": Extent(),
    # On this workload the window has almost no effect, so fewer windows are enough.
    "default": Extent(windows_s=(0.1, 0.25, 1.0, inf), ordered_windows_s=(1.0,), delayed_windows_s=(0.25, 1.0, inf)),
}
QUICK = Extent(
    samples=(0,),
    requests=QUICK_REQUESTS,
    windows_s=(0.1, 1.0, inf),
    ordered_windows_s=(1.0,),
    delayed_windows_s=(0.1, 1.0),
    rates={workload: rates[1:] for workload, rates in RATES.items()},
)


@click.command()
@click.option("--quick", is_flag=True, help="Measure a small part of every section, in less than a minute.")
def main(quick: bool) -> None:
    """Measure the effect of the dispatch window in virtual time, and print the tables."""
    for workload in workloads():
        extent = QUICK if quick else FULL[workload]
        _windows(workload, extent)
        _orders(workload, extent)
        _delays(workload, extent)


def _windows(workload: str, extent: Extent) -> None:
    print(f"## {workload}: windows\n")
    of = product(POLICIES, (True, False), extent.rates[workload], extent.windows_s)
    rows = [
        (
            f"{policy} | {'on' if rebalance else 'off'} | {rate} | {_name(window_s)}",
            _cases(workload, rate, extent, _routing(window_s, policy=policy, rebalance=rebalance)),
        )
        for policy, rebalance, rate, window_s in of
        if rebalance or window_s in extent.ordered_windows_s
    ]
    _table("policy | rebalance | requests/s | window", rows)


def _orders(workload: str, extent: Extent) -> None:
    print(
        f"## {workload}: held requests in the order of Deadline, with rebalancing (above dualmap_paper is by arrival)\n"
    )
    rows = [
        (
            f"{policy} | {rate} | {_name(window_s)}",
            _cases(workload, rate, extent, _routing(window_s, policy=policy, order="Deadline")),
        )
        for policy, rate, window_s in product(POLICIES, extent.rates[workload], extent.ordered_windows_s)
    ]
    _table("policy | requests/s | window", rows)


def _delays(workload: str, extent: Extent) -> None:
    rate = extent.rates[workload][-1]
    print(f"## {workload} at {rate}/s: late feedback and several routers (policy dualmap)\n")
    rows = [
        (
            f"{routers} | {1000 * delay_s:g} | {_name(window_s)}",
            _cases(workload, rate, extent, _routing(window_s), routers=routers, feedback_delay_s=delay_s),
        )
        for routers, delay_s, window_s in product((1, 4), DELAYS_S, extent.delayed_windows_s)
    ]
    _table("routers | feedback delay ms | window", rows)


def _routing(window_s: float, *, policy: str = "dualmap", rebalance: bool = True, order: str = "Fcfs") -> Routing:
    return Routing(
        policy=policy,
        rebalance=Rebalance(enabled=rebalance),
        queue=Queue(dispatch_window_s=window_s, order=order),
    )


def _cases(
    workload: str,
    rate: float,
    extent: Extent,
    routing: Routing,
    *,
    routers: int = 1,
    feedback_delay_s: float = 0.01,
) -> list[Case]:
    return [
        Case(
            workload=workload,
            sample=sample,
            rate=rate,
            routing=routing,
            replicas=(Replica(),) * routers,
            exchange=ReplicationConfig() if routers > 1 else None,
            feedback_delay_s=feedback_delay_s,
            requests=extent.requests,
        )
        for sample in extent.samples
    ]


def _table(heads: str, rows: Sequence[tuple[str, list[Case]]]) -> None:
    results = iter(run_all(measure, [case for _, cases in rows for case in cases]))
    print(f"| {heads} | {COLUMNS} |")
    print(f"|{'---|' * (heads.count('|') + COLUMNS.count('|') + 2)}")
    for name, cases in rows:
        print(f"| {name} | {_cells([next(results) for _ in cases])} |")
    print()


def _cells(of: Sequence[Summary]) -> str:
    return " | ".join(
        (
            seconds(each.ttft_p50_s for each in of),
            seconds(each.ttft_p90_s for each in of),
            seconds(each.ttft_p99_s for each in of),
            percent(each.slo_attainment for each in of),
            percent(each.hit_rate for each in of),
            percent(each.held_share for each in of),
            percent(each.rules.get(REBALANCED.name, 0) / each.requests for each in of),
            percent(each.refused / each.requests for each in of),
        )
    )


def _name(window_s: float) -> str:
    return "Unlimited" if window_s == inf else f"{window_s:g} s"
