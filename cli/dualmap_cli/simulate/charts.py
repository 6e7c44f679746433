"""Charts of simulations: TTFT, attainment, hit rate against balance (DualMap paper, Figure 1), and loads (Figure 8)."""

from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import Path
from statistics import fmean, median
from typing import Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dualmap_cli.chart_style import DPI, INK, SLO_COLOUR, finish
from dualmap_cli.simulate.runs import Run
from dualmap_cli.simulate.values import count_text
from dualmap_sim.workloads.catalog import Workload

_COLOURS: Final = (
    *("#0f766e", "#c2571a", "#6d4bc3", "#2f6db5", "#b8860b", "#8a94a3", "#a61e4d", "#4d7c0f", "#0891b2", "#7c2d12"),
)
_MARKERS: Final = "os^Dv"
"""After all colours are used, the same colours follow with the next marker."""
_ROW_INCHES: Final = 3.3
_COLUMNS: Final = 3
_LINES_MOST: Final = 16
"""The maximum number of instances with one line per instance. With more instances, the chart shows range and median."""


def draw_runs(path: Path, runs: Sequence[Run]) -> None:
    """Draw runs of one or more policies at one or more rates into a PNG or SVG file."""
    policies = tuple(dict.fromkeys(run.experiment.policy for run in runs))
    rates = sorted({run.experiment.requests_per_s for run in runs})
    loads = [run for run in runs if run.experiment.requests_per_s == rates[-1] and run.samples]
    rows = 1 + ceil(len(loads) / _COLUMNS)
    figure = Figure(figsize=(12.5, _ROW_INCHES * rows + 0.5), layout="constrained", facecolor="white")
    grid = figure.add_gridspec(rows, _COLUMNS)
    ttft, attainment, balance = (figure.add_subplot(grid[0, column]) for column in range(_COLUMNS))
    styles = _styles(policies)
    if len(rates) > 1:
        _draw_ttft_over_rate(ttft, runs, styles)
        _draw_attainment_over_rate(attainment, runs, styles)
    else:
        _draw_percentiles(ttft, runs, styles)
        _draw_attainment(attainment, runs, styles)
    _draw_balance(balance, runs, styles)
    _draw_legend(figure, styles)
    first: Axes | None = None
    for number, run in enumerate(loads):
        row, column = divmod(number, _COLUMNS)
        axes = figure.add_subplot(grid[1 + row, column], sharex=first, sharey=first)
        first = first or axes
        _draw_loads(axes, run, styles)
    if first is not None:
        # The limit is set after the last panel, because it ends the automatic scaling of all panels with shared axes.
        first.set_ylim(bottom=0)
    base = runs[0].experiment
    figure.suptitle(
        f"{_source(base.workload)}: {count_text(runs[0].requests, 'request')} at "
        f"{', '.join(f'{rate:g}' for rate in rates)}/s on {count_text(base.instances, 'instance')}",
        color=INK,
        fontweight="bold",
    )
    figure.savefig(path, dpi=DPI)


def draw_goodputs(
    path: Path, found: Sequence[tuple[str, Sequence[float]]], *, attainment: float, slo_ttft_s: float
) -> None:
    """Draw each policy's mean goodput as a bar, each window's rate as a dot, and a line from lowest to highest."""
    figure = Figure(figsize=(max(5.0, 1.1 * len(found) + 2), 4.2), layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    styles = _styles([policy for policy, _ in found])
    for place, (policy, rates) in enumerate(found):
        bars = axes.bar(place, fmean(rates), 0.62, color=styles[policy][0], alpha=0.85)
        axes.bar_label(bars, [f"{fmean(rates):.2f}"], fontsize=9, color=INK, padding=3, label_type="center")
        axes.vlines(place, min(rates), max(rates), color=INK, linewidth=1.4)
        axes.plot([place] * len(rates), rates, "o", color=INK, markersize=4)
    axes.set_xticks(range(len(found)), [policy for policy, _ in found], rotation=25, ha="right")
    axes.set_ylim(bottom=0)
    finish(axes, f"goodput (requests/s with {attainment:.0%} within {slo_ttft_s:g} s)")
    figure.savefig(path, dpi=DPI)


def _source(workload: Workload) -> str:
    file = workload.trace or workload.recording
    return file.name if file is not None else workload.name


_Styles = Mapping[str, tuple[str, str]]
"""The colour and the marker of each policy."""


def _styles(policies: Sequence[str]) -> _Styles:
    return {
        policy: (_COLOURS[number % len(_COLOURS)], _MARKERS[number // len(_COLOURS) % len(_MARKERS)])
        for number, policy in enumerate(policies)
    }


def _draw_ttft_over_rate(axes: Axes, runs: Sequence[Run], styles: _Styles) -> None:
    for policy, (colour, marker) in styles.items():
        own = _by_rate(runs, policy)
        rates = [run.experiment.requests_per_s for run in own]
        axes.plot(rates, [run.summary.ttft_p50_s for run in own], "-", marker=marker, color=colour, markersize=4)
        axes.plot(rates, [run.summary.ttft_p90_s for run in own], "--", marker=marker, color=colour, markersize=4)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    _mark_slo(axes, runs)
    axes.set_xlabel("requests/s", color=INK)
    finish(axes, "TTFT p50 (solid) and p90 (dashed), s")


def _draw_attainment_over_rate(axes: Axes, runs: Sequence[Run], styles: _Styles) -> None:
    for policy, (colour, marker) in styles.items():
        own = _by_rate(runs, policy)
        rates = [run.experiment.requests_per_s for run in own]
        axes.plot(rates, [100 * run.summary.slo_attainment for run in own], marker=marker, color=colour, markersize=4)
    axes.set_ylim(0, 103)
    axes.set_xlabel("requests/s", color=INK)
    finish(axes, f"first token within {runs[0].experiment.slo_ttft_s:g} s, %")


def _draw_percentiles(axes: Axes, runs: Sequence[Run], styles: _Styles) -> None:
    width = 0.8 / len(runs)
    for number, run in enumerate(runs):
        figures = run.summary
        heights = [figures.ttft_p50_s, figures.ttft_p90_s, figures.ttft_p99_s]
        at = [place + (number - (len(runs) - 1) / 2) * width for place in range(len(heights))]
        axes.bar(at, heights, width * 0.92, color=styles[run.experiment.policy][0])
    axes.set_xticks(range(3), ["p50", "p90", "p99"])
    _mark_slo(axes, runs)
    finish(axes, "TTFT, s")


def _draw_attainment(axes: Axes, runs: Sequence[Run], styles: _Styles) -> None:
    shares = [100 * run.summary.slo_attainment for run in runs]
    bars = axes.bar(range(len(runs)), shares, 0.62, color=[styles[run.experiment.policy][0] for run in runs])
    axes.bar_label(bars, [f"{share:.1f}" for share in shares], fontsize=8, color=INK, padding=2)
    axes.set_xticks([])
    axes.set_ylim(0, 112)
    finish(axes, f"first token within {runs[0].experiment.slo_ttft_s:g} s, %")


def _draw_balance(axes: Axes, runs: Sequence[Run], styles: _Styles) -> None:
    """Draw hit rate against CV, with a line from each policy's lowest rate to its highest; top left is best."""
    for policy, (colour, marker) in styles.items():
        own = _by_rate(runs, policy)
        across, up = [run.summary.pending_cv for run in own], [100 * run.summary.hit_rate for run in own]
        axes.plot(across, up, "-", color=colour, alpha=0.4, linewidth=1)
        sizes = [18.0 + 30.0 * (number + 1) / len(own) for number in range(len(own))]
        axes.scatter(across, up, s=sizes, marker=marker, color=colour, zorder=3)
    axes.set_xlabel("load imbalance (CV of pending tokens)", color=INK)
    axes.margins(0.15)
    finish(axes, "hit rate, %" if len(runs) == len(styles) else "hit rate, % (larger dots: higher rates)")


def _draw_loads(axes: Axes, run: Run, styles: _Styles) -> None:
    """Draw each instance's pending tokens over time."""
    colour, _ = styles[run.experiment.policy]
    at_s = [sample.at_s for sample in run.samples]
    members = list(dict.fromkeys(member for sample in run.samples for member in sample.pending_tokens))
    loads = [[sample.pending_tokens.get(member, 0) / 1000 for member in members] for sample in run.samples]
    if len(members) <= _LINES_MOST:
        for number in range(len(members)):
            axes.plot(at_s, [load[number] for load in loads], linewidth=0.8, alpha=0.7)
    else:
        axes.fill_between(at_s, [min(load) for load in loads], [max(load) for load in loads], color=colour, alpha=0.3)
        axes.plot(at_s, [median(load) for load in loads], color=colour, linewidth=1)
    axes.set_xlabel("seconds", color=INK)
    what = "of each instance" if len(members) <= _LINES_MOST else "of the instances (range, median)"
    finish(axes, f"{run.experiment.policy} at {run.experiment.requests_per_s:g}/s: pending ktokens {what}")


def _draw_legend(figure: Figure, styles: _Styles) -> None:
    """Draw one legend of the policies for all panels, at the bottom."""
    axes = figure.axes[0]
    handles = [
        axes.plot([], [], marker=marker, color=colour, linestyle="", label=policy)[0]
        for policy, (colour, marker) in styles.items()
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 8), frameon=False, fontsize=9)


def _mark_slo(axes: Axes, runs: Sequence[Run]) -> None:
    axes.axhline(runs[0].experiment.slo_ttft_s, color=SLO_COLOUR, linewidth=1, linestyle=":", zorder=0.5)
    axes.annotate(
        "SLO",
        (1, runs[0].experiment.slo_ttft_s),
        xycoords=axes.get_yaxis_transform(),
        xytext=(-2, 2),
        textcoords="offset points",
        ha="right",
        fontsize=8,
        color=SLO_COLOUR,
    )


def _by_rate(runs: Sequence[Run], policy: str) -> list[Run]:
    own = [run for run in runs if run.experiment.policy == policy]
    return sorted(own, key=lambda run: run.experiment.requests_per_s)
