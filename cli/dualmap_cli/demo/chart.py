"""The demo's chart: TTFT percentiles, SLO attainment, hit rate, and TTFT over time, per policy."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from matplotlib.axes import Axes
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from dualmap_cli.chart_style import DPI, INK, SLO_COLOUR, finish
from dualmap_cli.demo.plan import SLO_TTFT_S, Plan
from dualmap_cli.demo.report import PolicyReport, PolicyRun, percentile, ttfts_s
from dualmap_sim.workloads.statistics import measure

_COLOURS: Final = ("#8a94a3", "#0f766e", "#c2571a", "#6d4bc3", "#b8860b", "#2f6db5")
_BINS: Final = 24
_LARGER: Final = 1.0
"""The letters of this chart are one point larger, because a page shows it smaller."""
_LEVEL_LABELS: Final = 2
"""Number of policy names that fit side by side under a small chart."""


def draw(path: Path, plan: Plan, runs: Sequence[PolicyRun], reports: Sequence[PolicyReport]) -> None:
    """Write the chart as a PNG."""
    figure = Figure(figsize=(11, 6.6), layout="constrained", facecolor="white")
    grid = figure.add_gridspec(2, 3, width_ratios=(1.7, 1, 1), height_ratios=(1, 1.05))
    percentiles, attainment, hits = (figure.add_subplot(grid[0, column]) for column in range(3))
    over_time = figure.add_subplot(grid[1, :])
    colours = {each.policy: _COLOURS[index % len(_COLOURS)] for index, each in enumerate(reports)}
    _draw_percentiles(percentiles, reports, colours)
    _draw_shares(attainment, f"first token within {SLO_TTFT_S:g} s", [r.slo_attainment for r in reports], colours)
    ideal = measure(plan.trace).ideal_hit_rate
    _draw_shares(hits, f"hit rate (at best {ideal:.0%})", [r.hit_rate for r in reports], colours)
    hits.axhline(ideal * 100, color=INK, linewidth=1.2, linestyle="--", zorder=0.5)
    _draw_over_time(over_time, plan, runs, colours)
    figure.suptitle(
        f"workload {plan.trace.name}: {len(plan.trace.requests):,} requests at {plan.rate:.1f}/s through Envoy "
        f"to {plan.engines} simulated engines",
        color=INK,
        fontweight="bold",
    )
    figure.savefig(path, dpi=DPI)


def _draw_percentiles(axes: Axes, reports: Sequence[PolicyReport], colours: dict[str, str]) -> None:
    """Draw bars for p50, p90 and p99 side by side per policy, and a line for the SLO."""
    names = ("p50", "p90", "p99")
    width = 0.8 / len(reports)
    for index, each in enumerate(reports):
        values = [value or 0.0 for value in (each.ttft_p50_s, each.ttft_p90_s, each.ttft_p99_s)]
        at = [position + (index - (len(reports) - 1) / 2) * width for position in range(len(names))]
        bars = axes.bar(at, values, width * 0.92, color=colours[each.policy], label=each.policy)
        _label(axes, bars, [f"{value:.1f}" for value in values])
    axes.set_xticks(range(len(names)), names)
    axes.set_xlim(-0.55, len(names) - 0.25)
    axes.margins(y=0.15)
    _mark_slo(axes)
    finish(axes, "time to first token (s)", larger=_LARGER)
    axes.legend(frameon=False, fontsize=9, loc="upper left")


def _draw_shares(axes: Axes, title: str, shares: Sequence[float], colours: dict[str, str]) -> None:
    """Draw one bar per policy, from 0 to 100 %."""
    bars = axes.bar(range(len(shares)), [share * 100 for share in shares], 0.62, color=list(colours.values()))
    _label(axes, bars, [f"{share:.1%}" for share in shares])
    axes.set_xticks(range(len(shares)), list(colours), fontsize=9, rotation=0 if len(shares) <= _LEVEL_LABELS else 25)
    axes.set_ylim(0, 112)
    axes.set_yticks(range(0, 101, 25), [f"{tick}%" for tick in range(0, 101, 25)])
    finish(axes, title, larger=_LARGER)


def _draw_over_time(axes: Axes, plan: Plan, runs: Sequence[PolicyRun], colours: dict[str, str]) -> None:
    """Draw every request as a dot, and the median and 90th percentile of each time interval as lines."""
    bin_s = plan.trace.duration_s / _BINS or 1.0
    for run in runs:
        points = ttfts_s(run, speed=plan.speed)
        colour = colours[run.policy]
        arrivals_s, dots_s = [due_s for due_s, _ in points], [ttft_s for _, ttft_s in points]
        axes.scatter(arrivals_s, dots_s, s=8, color=colour, alpha=0.4, linewidths=0)
        bins: dict[int, list[float]] = {}
        for due_s, ttft_s in points:
            bins.setdefault(min(int(due_s / bin_s), _BINS - 1), []).append(ttft_s)
        middles = [(index + 0.5) * bin_s for index in sorted(bins)]
        for share, style in ((0.9, ":"), (0.5, "-")):
            line = [percentile(bins[index], share) or 0.0 for index in sorted(bins)]
            label = f"{run.policy} {'median' if share == 0.5 else 'p90'}"
            axes.plot(middles, line, style, color=colour, linewidth=2, label=label)
    _mark_slo(axes)
    axes.set_ylim(bottom=0)
    axes.margins(x=0.01)
    axes.set_xlabel("arrival (model seconds)", color=INK)
    finish(axes, "time to first token of each request (s)", larger=_LARGER)
    axes.legend(frameon=False, fontsize=9, ncols=len(runs), loc="upper left")


def _mark_slo(axes: Axes) -> None:
    """Draw the SLO as a line behind the data, with a label at the right end."""
    axes.axhline(SLO_TTFT_S, color=SLO_COLOUR, linewidth=1.2, linestyle="--", zorder=0.5)
    axes.annotate(
        "SLO",
        (1, SLO_TTFT_S),
        xycoords=axes.get_yaxis_transform(),
        xytext=(-2, 2),
        textcoords="offset points",
        ha="right",
        va="bottom",
        fontsize=9,
        color=SLO_COLOUR,
        path_effects=[_halo()],
    )


def _label(axes: Axes, bars: BarContainer, texts: Sequence[str]) -> None:
    """Write each bar's value above the bar, on white, so that no line crosses the number."""
    for label in axes.bar_label(bars, texts, fontsize=9, color=INK, padding=3):
        label.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 1.5})


def _halo() -> withStroke:
    """Return a white outline for letters that cross lines."""
    return withStroke(linewidth=3, foreground="white")
