"""Computes the figures of the runs, and writes the page with its tables and its plot."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Final

from bench.paper.charts import colour, finish, grid, save
from bench.paper.tables import table
from bench.yardstick.decisions import Agreement
from bench.yardstick.setting import Costs, Served

from dualmap_sim.summary import percentile

ROUND_ROBIN: Final = {"Dynamo": "round robin", "this project": "`round_robin`"}
_LINES: Final = {"Dynamo": "--", "this project": "-"}


@dataclass(frozen=True, slots=True, order=True)
class Run:
    """One measured run: the costs, the rate, and the router of one of the two systems."""

    costs: Costs
    rate: float
    system: str
    router: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The figures of a run: TTFT in seconds, and the share of the prompt tokens that the engines had cached."""

    mean_s: float
    p50_s: float
    p90_s: float
    reuse: float


Measured = Mapping[Run, Sequence[Figures]]
"""The figures of each run, one for each sample."""


def figures(served: Sequence[Served]) -> Figures:
    """Return the figures of some requests."""
    ttft_s = sorted(each.ttft_s for each in served)
    return Figures(
        mean_s=fmean(ttft_s),
        p50_s=percentile(ttft_s, 0.5),
        p90_s=percentile(ttft_s, 0.9),
        reuse=sum(each.cached_tokens for each in served) / sum(each.prompt_tokens for each in served),
    )


def results_table(measured: Measured, costs: Costs) -> str:
    """Return a table of the runs with some costs, each beside round robin of its own system."""
    rows = []
    for run, samples in measured.items():
        if run.costs is not costs:
            continue
        base = _mean(measured[Run(costs, run.rate, run.system, ROUND_ROBIN[run.system])])
        own = _mean(samples)
        times = zip((own.mean_s, own.p50_s, own.p90_s), (base.mean_s, base.p50_s, base.p90_s), strict=True)
        shown = (f"{value:.3f}" if own == base else f"{value:.3f} ({value / other:.2f})" for value, other in times)
        reuse = f"{100 * own.reuse:.1f}" if own == base else f"{100 * own.reuse:.1f} ({own.reuse / base.reuse:.2f})"
        rows.append((f"{run.rate:g}", run.system, run.router, *shown, reuse))
    return table(("requests/s", "replay", "router", "TTFT mean, s", "p50, s", "p90, s", "reuse, %"), rows)


def agreement_table(agreed: Mapping[float, Mapping[str, Agreement]]) -> str:
    """Return a table of the decisions that have the lowest cost by Dynamo's formula."""
    rows = [
        (f"{rate:g}", name, f"{100 * each.same:.1f}", f"{each.excess_blocks:.1f}")
        for rate, rules in agreed.items()
        for name, each in rules.items()
    ]
    return table(("requests/s", "decided by", "lowest cost by Dynamo's formula, %", "mean excess, blocks"), rows)


def plot(path: Path, measured: Measured, costs: Costs) -> None:
    """Draw the mean TTFT and the reuse over the rate."""
    figure, axes = grid(1, 2)
    lines: dict[tuple[str, str], list[tuple[float, Figures]]] = {}
    for run, samples in measured.items():
        if run.costs is costs and "," not in run.router:
            lines.setdefault((run.system, run.router), []).append((run.rate, _mean(samples)))
    for (system, router), points in lines.items():
        policy = {"round robin": "round_robin", "KV router": "dynamo"}.get(router, router.strip("`"))
        rates = [rate for rate, _ in points]
        style = {"linestyle": _LINES[system], "marker": "o", "markersize": 4, "color": colour(policy)}
        axes[0][0].plot(rates, [each.mean_s for _, each in points], label=f"{system}: {router.strip('`')}", **style)
        axes[0][1].plot(rates, [100 * each.reuse for _, each in points], **style)
    axes[0][0].set_yscale("log")
    finish(axes[0][0], "mean TTFT, s", across="requests/s")
    finish(axes[0][1], "reuse, % of prompt tokens", across="requests/s")
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    save(figure, path)


def _mean(samples: Sequence[Figures]) -> Figures:
    return Figures(
        mean_s=fmean(each.mean_s for each in samples),
        p50_s=fmean(each.p50_s for each in samples),
        p90_s=fmean(each.p90_s for each in samples),
        reuse=fmean(each.reuse for each in samples),
    )
