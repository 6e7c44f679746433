"""Charts of a fit: predicted against measured times, their errors over the prompts, and the share within each error."""

from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from dualmap_cli.chart_style import COLOUR, DPI, INK, finish
from dualmap_sim.fitting.estimates import EngineFit


def draw_fit(path: Path, fit: EngineFit) -> None:
    """Draw the predictions of a fit into a PNG or SVG file."""
    figure = Figure(figsize=(14, 4.6), layout="constrained", facecolor="white")
    times, residuals, errors = figure.subplots(1, 3)
    measured_s = [each.measured_s for each in fit.predictions]
    predicted_s = [each.predicted_s for each in fit.predictions]
    times.scatter(measured_s, predicted_s, s=6, color=COLOUR, alpha=0.5, linewidths=0)
    if measured_s:
        ends = [min(measured_s), max(measured_s)]
        times.plot(ends, ends, color=INK, linewidth=1)
        times.set_xscale("log")
        times.set_yscale("log")
        # The labels of minor ticks would overlap.
        times.xaxis.set_minor_formatter(NullFormatter())
        times.yaxis.set_minor_formatter(NullFormatter())
    times.set_xlabel("measured TTFT, seconds", color=INK)
    times.set_ylabel("predicted TTFT, seconds", color=INK)
    finish(times, "second half, engine fitted to the first half", grid="both")
    tokens = [each.prompt_tokens for each in fit.predictions]
    residuals.scatter(
        tokens, [100 * each.error for each in fit.predictions], s=6, color=COLOUR, alpha=0.5, linewidths=0
    )
    residuals.axhline(0, color=INK, linewidth=1)
    if tokens:
        # An error may have any size; that of one request in ten may lie outside.
        most = max(50.0, 100 * (fit.error_quantile(0.9) or 0.0))
        residuals.set_ylim(-min(100.0, most), most)
    residuals.set_xlabel("prompt, tokens", color=INK)
    finish(residuals, "predicted above measured TTFT, %", grid="both")
    shares = sorted(100 * abs(each.error) for each in fit.predictions)
    errors.step(shares, [100 * (number + 1) / len(shares) for number in range(len(shares))], color=COLOUR)
    errors.set_xlim(0, max(50.0, 100 * (fit.error_quantile(0.9) or 0.0)))
    errors.set_ylim(0, 103)
    errors.set_xlabel("error of predicted TTFT, %", color=INK)
    finish(errors, "requests with at most this error, %", grid="both")
    figure.suptitle(f"{fit.pool}: {fit.requests:,} requests", color=INK, fontweight="bold")
    figure.savefig(path, dpi=DPI)
