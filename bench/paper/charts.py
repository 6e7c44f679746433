"""The common style of all plots: a colour and a marker for each policy, plain axes, and the legend at the bottom."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK: Final = "#22303c"
SLO_COLOUR: Final = "#c0392b"
_COLOURS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "dualmap": "#0f766e",
        "dualmap_paper": "#c2571a",
        "min_ttft": "#2f6db5",
        "preble": "#6d4bc3",
        "least_loaded": "#b8860b",
        "cache_affinity": "#8a94a3",
        "llmd_default": "#a61e4d",
        "llumnix": "#4d7c0f",
        "dynamo": "#0891b2",
        "lmetric": "#1e3a8a",
        "linear_score": "#84cc16",
        "ear": "#7c2d12",
        "round_robin": "#db2777",
        "limit": "#111827",
        "limit_pooled": "#6b7280",
        "limit_deadline": "#9ca3af",
    }
)
_OTHERS: Final = ("#7c2d12", "#0891b2", "#4d7c0f", "#a61e4d", "#2f6db5", "#6d4bc3", "#b8860b")
_MARKERS: Final = "os^Dv<>Xph*d"
_DPI: Final = 110
_COLUMN_INCHES: Final = 3.7
_ROW_INCHES: Final = 2.9


def colour(policy: str) -> str:
    """Return a policy's colour, the same in every plot."""
    return _COLOURS.get(policy) or _OTHERS[sum(policy.encode()) % len(_OTHERS)]


def marker(policies: Sequence[str], policy: str) -> str:
    """Return a policy's marker among the policies of a plot."""
    return _MARKERS[list(policies).index(policy) % len(_MARKERS)]


def grid(rows: int, columns: int) -> tuple[Figure, list[list[Axes]]]:
    """Return a figure with that number of rows and columns of axes."""
    figure = Figure(
        figsize=(_COLUMN_INCHES * columns + 0.4, _ROW_INCHES * rows + 0.5), layout="constrained", facecolor="white"
    )
    axes = figure.subplots(rows, columns, squeeze=False)
    return figure, [list(row) for row in axes]


def draw_lines(
    axes: Axes, policies: Sequence[str], lines: Mapping[str, Sequence[tuple[float, float | None]]], *, style: str = "-"
) -> None:
    """Draw each policy's measured points as a line."""
    for policy in policies:
        points = [(x, y) for x, y in lines.get(policy, ()) if y is not None]
        if points:
            across, up = zip(*points, strict=True)
            axes.plot(
                across, up, style, marker=marker(policies, policy), color=colour(policy), markersize=4, linewidth=1.3
            )


def finish(axes: Axes, title: str, *, across: str = "") -> None:
    """Set the title of the axes and remove decoration."""
    axes.set_title(title, loc="left", fontsize=9, color=INK)
    axes.set_xlabel(across, fontsize=8, color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e4e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, labelsize=8)
    axes.tick_params(which="minor", labelsize=6)


def legend(figure: Figure, policies: Sequence[str], *, names: Mapping[str, str] = MappingProxyType({})) -> None:
    """Draw one legend of the policies for all axes, at the bottom."""
    axes = figure.axes[0]
    handles = [
        axes.plot(
            [],
            [],
            marker=marker(policies, policy),
            color=colour(policy),
            linestyle="",
            label=names.get(policy, policy),
        )[0]
        for policy in policies
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 6), frameon=False, fontsize=8)


def mark_slo(axes: Axes, slo_s: float = 5.0) -> None:
    """Draw the SLO as a horizontal line."""
    axes.axhline(slo_s, color=SLO_COLOUR, linewidth=1, linestyle=":", zorder=0.5)


def bars(axes: Axes, policies: Sequence[str], values: Iterable[Sequence[float]]) -> None:
    """Draw each policy's mean as a bar, with a line from the lowest to the highest value."""
    for place, (policy, each) in enumerate(zip(policies, values, strict=True)):
        if not each:
            continue
        mean = sum(each) / len(each)
        axes.bar(place, mean, 0.66, color=colour(policy), alpha=0.9)
        axes.vlines(place, min(each), max(each), color=INK, linewidth=1.2)
        shown = INK if mean == 0 else "white"
        axes.text(place, 0.03 * mean, f"{mean:.2f}", ha="center", va="bottom", fontsize=7, color=shown, rotation=90)
    axes.set_xticks([])


def save(figure: Figure, path: Path) -> None:
    """Write a figure as PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=_DPI)
