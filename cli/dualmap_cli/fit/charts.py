"""Charts of a fit: predicted against measured times, and the share of predictions within each error."""

from pathlib import Path
from typing import Final

from matplotlib.figure import Figure

from dualmap_sim.fitting.estimates import EngineFit

_COLOUR: Final = "#0f766e"
_INK: Final = "#22303c"
_DPI: Final = 130


def draw_fit(path: Path, fit: EngineFit) -> None:
    """Draw the predictions of a fit into a PNG or SVG file."""
    figure = Figure(figsize=(10, 4.6), layout="constrained", facecolor="white")
    times, errors = figure.subplots(1, 2)
    measured_s = [each.measured_s for each in fit.predictions]
    predicted_s = [each.predicted_s for each in fit.predictions]
    times.scatter(measured_s, predicted_s, s=6, color=_COLOUR, alpha=0.5, linewidths=0)
    if measured_s:
        ends = [min(measured_s), max(measured_s)]
        times.plot(ends, ends, color=_INK, linewidth=1)
        times.set_xscale("log")
        times.set_yscale("log")
    times.set_xlabel("measured TTFT, seconds", color=_INK)
    times.set_ylabel("predicted TTFT, seconds", color=_INK)
    times.set_title("second half, engine fitted to the first half", loc="left", fontsize=9.5, color=_INK)
    shares = sorted(100 * abs(each.error) for each in fit.predictions)
    errors.step(shares, [100 * (number + 1) / len(shares) for number in range(len(shares))], color=_COLOUR)
    errors.set_xlim(0, max(50.0, 100 * (fit.error_quantile(0.9) or 0.0)))
    errors.set_ylim(0, 103)
    errors.set_xlabel("error of predicted TTFT, %", color=_INK)
    errors.set_title("requests with at most this error, %", loc="left", fontsize=9.5, color=_INK)
    for axes in (times, errors):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#e4e7eb", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(colors=_INK, labelsize=8)
    figure.suptitle(f"{fit.pool}: {fit.requests:,} requests", color=_INK, fontweight="bold")
    figure.savefig(path, dpi=_DPI)
