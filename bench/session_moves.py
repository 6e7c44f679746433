"""python -m bench session_moves: sessions that move with and without their KV, in EAR's closed loop of agents.

The section ``sessions`` of ``bench paper`` has EAR's own table. There, no router knows that engines pull KV from each
other. Here, ``spec.routing.session.migration.pull`` tells the router, so that a move costs the fetch instead of the
prefill. Elastic Affinity Routing (3.2, 5.5) leaves the influence of the bandwidth open.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Final

import click
from bench.paper.agents import AGENT, BEYOND, EARLY_S, INSTANCES, PULL_TOKENS_PER_S, WARMUP, closed_loop_figures, known
from bench.paper.settings import as_shipped

from dualmap.pools.pool import Routing, Session, SessionMigration
from dualmap_sim.experiment import Experiment, run_experiment
from dualmap_sim.records import Record
from dualmap_sim.workloads.catalog import Workload

_OVERLOAD: Final = 8.0
_SEEDS: Final = (0, 1)
_HEADS: Final = (
    *("nominal requests/s", "policy", "KV of a moved session", "tokens/s"),
    *("amplification", "turn, mean s", "TTFT mean s", "p90", "worst instance's p90"),
    *("hit rate %", "fetched %", "moved %", "within SLO %"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Setting:
    """A policy, and how the KV of a moved session gets to its new instance: with ``tokens_per_s``, or not at all.

    If ``aware``, the router knows it. With ``rule``, ``session.migration`` decides before the policy.
    """

    policy: str
    tokens_per_s: float | None = None
    aware: bool = False
    rule: bool = False

    @property
    def shown(self) -> tuple[str, str, str]:
        """The policy, the way of the KV, and its speed."""
        name = {"ear_with": f"ear, T_hot {EARLY_S:g} s"}.get(self.policy, self.policy)
        name += " with session.migration" if self.rule else ""
        if self.tokens_per_s is None:
            return name, "computed again", ""
        return name, "fetched, router knows" if self.aware else "fetched", f"{self.tokens_per_s:,.0f}"

    def experiment(self, rate: float, seed: int, requests: int) -> Experiment:
        """Return the closed loop at a nominal rate."""
        engine = AGENT if self.tokens_per_s is None else replace(AGENT, pull_tokens_per_s=self.tokens_per_s)
        migration = SessionMigration(enabled=self.rule, pull=self.aware)
        return as_shipped(
            Experiment(
                workload=Workload(name="agentic", requests=requests, seed=seed),
                engine=engine,
                policy=self.policy,
                requests_per_s=rate,
                instances=INSTANCES,
                warmup=WARMUP,
                kv_moves=self.tokens_per_s is not None,
                routing=Routing(session=Session(migration=migration)),
            )
        )


_SETTINGS: Final = (
    _Setting(policy="dualmap"),
    _Setting(policy="dualmap", tokens_per_s=PULL_TOKENS_PER_S),
    *(
        _Setting(policy="dualmap", tokens_per_s=speed, aware=True)
        for speed in (10_000.0, 25_000.0, 100_000.0, 400_000.0)
    ),
    _Setting(policy="dualmap", rule=True),
    _Setting(policy="dualmap", tokens_per_s=PULL_TOKENS_PER_S, aware=True, rule=True),
    _Setting(policy="ear_with"),
    _Setting(policy="ear_with", tokens_per_s=PULL_TOKENS_PER_S),
    _Setting(policy="least_loaded"),
    _Setting(policy="least_loaded", tokens_per_s=PULL_TOKENS_PER_S),
)


@click.command()
@click.option("--quick", is_flag=True, help="One rate and one seed, with fewer requests.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per row.")
def session_moves(quick: bool, as_json: bool) -> None:
    """Compare sessions that move with and without their KV."""
    if not as_json:
        print(f"| {' | '.join(_HEADS)} |")
        print(f"|{'---|' * len(_HEADS)}")
    for rate in (_OVERLOAD,) if quick else (BEYOND, _OVERLOAD):
        for setting in _SETTINGS:
            row = _row(setting, rate, seeds=_SEEDS[:1] if quick else _SEEDS, requests=1200 if quick else 4000)
            print(json.dumps(row) if as_json else f"| {' | '.join(row.values())} |", flush=True)


def _row(setting: _Setting, rate: float, *, seeds: tuple[int, ...], requests: int) -> dict[str, str]:
    runs = []
    for seed in seeds:
        experiment = setting.experiment(rate, seed, requests)
        with known(EARLY_S):
            outcome = run_experiment(experiment)
        runs.append({**closed_loop_figures(experiment, outcome), "moved_share": _moved_share(outcome.records)})

    def mean(name: str, digits: int, scale: float = 1.0) -> str:
        return f"{fmean(each[name] for each in runs) * scale:.{digits}f}"

    cells = (
        f"{rate:g}",
        *setting.shown,
        mean("amplification", 2),
        mean("turn_mean_s", 1),
        mean("ttft_mean_s", 2),
        mean("ttft_p90_s", 2),
        mean("worker_max_p90_s", 2),
        mean("hit_rate", 1, 100.0),
        mean("pulled_share", 1, 100.0),
        mean("moved_share", 2, 100.0),
        mean("slo_attainment", 1, 100.0),
    )
    return dict(zip(_HEADS, cells, strict=True))


def _moved_share(records: Sequence[Record]) -> float:
    """Return the share of requests that went to another instance than their session's last one."""
    hosts: dict[int | None, str | None] = {}
    moved = 0
    for record in sorted(records, key=lambda each: each.dispatched_s or 0.0):
        last = hosts.get(record.arrival.session)
        moved += last is not None and last != record.endpoint
        hosts[record.arrival.session] = record.endpoint
    return moved / len(records)
