"""Charts of a recording: rate over time, lengths, TTFT, outcomes, requests of each member, and hot prefixes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dualmap_cli.chart_style import COLOUR, DPI, INK, SLO_COLOUR, finish
from dualmap_sim.recordings.figures import Figures

_SECOND_COLOUR: Final = "#c2571a"
_POINTS: Final = 1000
"""A curve of more values shows this many of them."""
_MEMBERS: Final = 24


def draw_figures(path: Path, figures: Figures, *, title: str) -> None:
    """Draw the figures of a recording into a PNG or SVG file."""
    figure = Figure(figsize=(12.5, 6.8), layout="constrained", facecolor="white")
    grid = figure.add_gridspec(2, 3)
    rate, lengths, ttft, outcomes, members, prefixes = (
        figure.add_subplot(grid[place // 3, place % 3]) for place in range(6)
    )
    _draw_rate(rate, figures)
    _draw_lengths(lengths, figures)
    _draw_ttft(ttft, figures)
    _draw_bars(outcomes, list(figures.outcomes), list(figures.outcomes.values()), "requests by outcome")
    _draw_members(members, figures)
    _draw_prefixes(prefixes, figures)
    reuse = "" if figures.reuse_at_best is None else f", {figures.reuse_at_best:.0%} of the prompt tokens reusable"
    # A dollar sign in a file's name would begin a formula.
    name = title.replace("$", r"\$")
    figure.suptitle(f"{name}: {figures.requests:,} requests{reuse}", color=INK, fontweight="bold")
    figure.savefig(path, dpi=DPI)


def _draw_rate(axes: Axes, figures: Figures) -> None:
    width_s, counts = figures.rates()
    if width_s:
        edges_s = [number * width_s for number in range(len(counts) + 1)]
        axes.stairs([count / width_s for count in counts], edges_s, fill=True, color=COLOUR, alpha=0.8)
    axes.set_xlabel("seconds", color=INK)
    axes.set_ylim(bottom=0)
    finish(axes, "requests per second")


def _draw_lengths(axes: Axes, figures: Figures) -> None:
    _draw_shares(axes, figures.prompt_tokens, COLOUR, "prompt")
    _draw_shares(axes, figures.output_tokens, _SECOND_COLOUR, "output")
    axes.set_xscale("log")
    axes.set_xlabel("tokens", color=INK)
    if figures.prompt_tokens or figures.output_tokens:
        axes.legend(frameon=False, fontsize=8)
    finish(axes, "requests with at most this length, %")


def _draw_ttft(axes: Axes, figures: Figures) -> None:
    _draw_shares(axes, figures.ttft_s, COLOUR, "TTFT")
    for slo_s in sorted(set(figures.slo_ttft_s.values())):
        axes.axvline(slo_s, color=SLO_COLOUR, linewidth=1, linestyle=":")
    axes.set_xscale("log")
    axes.set_xlabel("seconds (dotted: the pools' SLO)", color=INK)
    finish(axes, "streamed answers with at most this TTFT, %")


def _draw_shares(axes: Axes, ordered: Sequence[float], colour: str, label: str) -> None:
    """Draw the share of values that are at most as large as each value."""
    if not ordered:
        return
    last = len(ordered) - 1
    places = sorted({round(number * last / (_POINTS - 1)) for number in range(_POINTS)})
    # A logarithmic axis has no zero.
    values = [max(ordered[place], 1e-4) for place in places]
    axes.step(values, [100 * (place + 1) / len(ordered) for place in places], where="post", color=colour, label=label)
    axes.set_ylim(0, 103)


def _draw_members(axes: Axes, figures: Figures) -> None:
    busiest = sorted(figures.members, key=lambda each: -each.requests)[:_MEMBERS]
    shown = sorted(busiest, key=lambda each: (each.pool, each.member))
    title = (
        "requests by member" if len(busiest) == len(figures.members) else f"requests of the {_MEMBERS} busiest members"
    )
    _draw_bars(axes, [each.member for each in shown], [each.requests for each in shown], title)


def _draw_prefixes(axes: Axes, figures: Figures) -> None:
    names = [f"{each.tokens:,} tokens" for each in figures.hot_prefixes]
    shares = [100 * each.requests / figures.requests for each in figures.hot_prefixes]
    axes.barh(range(len(names)), shares, 0.7, color=COLOUR, alpha=0.85)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    finish(axes, "hot prefixes: requests that share them, %")


def _draw_bars(axes: Axes, names: Sequence[str], counts: Sequence[int], title: str) -> None:
    bars = axes.bar(range(len(names)), counts, 0.7, color=COLOUR, alpha=0.85)
    axes.bar_label(bars, [f"{count:,}" for count in counts], fontsize=8, color=INK, padding=2)
    axes.set_xticks(range(len(names)), names, rotation=25, ha="right")
    axes.margins(y=0.15)
    finish(axes, title)
