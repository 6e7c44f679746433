"""The chart of a capacity plan: the share within the SLO of each size, with its interval."""

from pathlib import Path
from typing import Final

from matplotlib.figure import Figure

from dualmap_cli.plan.result import CapacityPlan

_COLOUR: Final = "#0f766e"
_INK: Final = "#22303c"
_GOAL_COLOUR: Final = "#c0392b"
_DPI: Final = 130


def draw_plan(path: Path, plan: CapacityPlan, *, attainment: float, slo_ttft_s: float) -> None:
    """Draw a plan into a PNG or SVG file."""
    figure = Figure(figsize=(6.4, 4.2), layout="constrained", facecolor="white")
    axes = figure.subplots()
    sizes = sorted((plan.size, *plan.smaller), key=lambda size: size.instances)
    values = [100 * each.slo_attainment.value for each in sizes]
    errors = [
        [100 * max(0.0, each.slo_attainment.value - each.slo_attainment.low) for each in sizes],
        [100 * max(0.0, each.slo_attainment.high - each.slo_attainment.value) for each in sizes],
    ]
    names = [str(each.instances) for each in sizes]
    axes.bar(names, values, 0.6, yerr=errors, capsize=4, color=_COLOUR, alpha=0.85, ecolor=_INK)
    axes.axhline(100 * attainment, color=_GOAL_COLOUR, linewidth=1, linestyle=":")
    axes.set_xlabel("instances", color=_INK)
    axes.set_ylim(0, 103)
    axes.set_title(f"requests within {slo_ttft_s:g} s, % (dotted: the goal)", loc="left", fontsize=9.5, color=_INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=_INK, labelsize=8)
    figure.suptitle(f"{plan.instances} instances", color=_INK, fontweight="bold")
    figure.savefig(path, dpi=_DPI)
