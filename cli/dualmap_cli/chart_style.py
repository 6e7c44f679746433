"""The appearance that the charts of all commands share."""

from typing import Final, Literal

from matplotlib.axes import Axes

INK: Final = "#22303c"
COLOUR: Final = "#0f766e"
SLO_COLOUR: Final = "#c0392b"
DPI: Final = 130


def finish(axes: Axes, title: str, *, grid: Literal["y", "both"] | None = "y", larger: float = 0.0) -> None:
    """Set the title of the axes, and remove decoration except the grid lines of ``grid``.

    ``larger`` is what is added to the sizes of the letters, in points.
    """
    axes.set_title(title, loc="left", fontsize=9.5 + larger, color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    if grid is not None:
        axes.grid(axis=grid, color="#e4e7eb", linewidth=0.8)
        axes.set_axisbelow(True)
    axes.tick_params(colors=INK, labelsize=8 + larger)
