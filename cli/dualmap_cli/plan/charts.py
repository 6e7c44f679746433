"""The chart of a capacity plan: the share within the SLO of each size, with its interval."""

from pathlib import Path

from matplotlib.figure import Figure

from dualmap_cli.chart_style import COLOUR, DPI, INK, SLO_COLOUR, finish
from dualmap_cli.plan.output import fleet_text, instances_text
from dualmap_cli.plan.result import CapacityPlan


def draw_plan(path: Path, plan: CapacityPlan, *, attainment: float, slo_ttft_s: float) -> None:
    """Draw a plan into a PNG or SVG file."""
    figure = Figure(figsize=(6.4, 4.2), layout="constrained", facecolor="white")
    axes = figure.subplots()
    sizes = sorted((plan.size, *plan.smaller), key=lambda size: (size.fleet.instances, size.fleet.prefillers))
    values = [100 * each.slo_attainment.value for each in sizes]
    errors = [
        [100 * max(0.0, each.slo_attainment.value - each.slo_attainment.low) for each in sizes],
        [100 * max(0.0, each.slo_attainment.high - each.slo_attainment.value) for each in sizes],
    ]
    names = [fleet_text(each.fleet) for each in sizes]
    axes.bar(names, values, 0.6, yerr=errors, capsize=4, color=COLOUR, alpha=0.85, ecolor=INK)
    axes.axhline(100 * attainment, color=SLO_COLOUR, linewidth=1, linestyle=":")
    axes.set_xlabel("instances", color=INK)
    axes.set_ylim(0, 103)
    finish(axes, f"requests within {slo_ttft_s:g} s, % (dotted: the goal)", grid=None)
    figure.suptitle(instances_text(plan.size.fleet), color=INK, fontweight="bold")
    figure.savefig(path, dpi=DPI)
