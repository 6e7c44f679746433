"""Plots the model's times against the measured times, one dot for each request."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # A backend without a display; it must be selected before pyplot is imported.
from bench.engine.report import Fitted, by_scenario
from matplotlib import pyplot


def plot(path: Path, columns: Sequence[tuple[str, Sequence[Fitted]]]) -> None:
    """Write an image with a column for each recording (title and fits) and a row for each mode of the model."""
    rows = len(columns[0][1])
    figure, grid = pyplot.subplots(rows, len(columns), figsize=(5 * len(columns), 4.6 * rows), squeeze=False)
    for column, (title, fits) in enumerate(columns):
        for row, fitted in enumerate(fits):
            axes = grid[row][column]
            for name, replayed in by_scenario(fitted.replayed).items():
                axes.plot(
                    [each.seen.ttft_s for each in replayed],
                    [each.ttft_s for each in replayed],
                    ".",
                    markersize=5,
                    label=name,
                )
            times_s = [each.seen.ttft_s for each in fitted.replayed]
            ends = [min(times_s), max(times_s)]
            axes.plot(ends, ends, color="0.4", linewidth=0.8)
            axes.set(xscale="log", yscale="log", xlabel="TTFT of vLLM, s", ylabel="TTFT of the model, s")
            axes.set_title(f"{title}\nmodel: {fitted.mode}", fontsize=10)
    grid[0][0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    pyplot.close(figure)
