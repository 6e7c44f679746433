"""The plot of hit rate, prediction and TTFT by case and knowledge."""

from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Final

from bench.paper.charts import finish, grid, save
from bench.truth.cases import Case, Knowledge
from bench.truth.measures import Figures
from bench.truth.tables import Cells

_COLOURS: Final[Mapping[Knowledge, str]] = MappingProxyType(
    {
        Knowledge.NONE: "#db2777",
        Knowledge.RECORDS: "#8a94a3",
        Knowledge.USAGE: "#2f6db5",
        Knowledge.EVENTS: "#0f766e",
    }
)
_SHOWN: Final[Mapping[str, Callable[[Figures], float]]] = MappingProxyType(
    {
        "hit rate, %": lambda each: 100 * each.hit_rate,
        "prediction off by more than a block, %": lambda each: 100 * each.off,
        "mean TTFT, s": lambda each: each.ttft_mean_s,
    }
)
_WIDTH: Final = 0.2


def draw(path: Path, workloads: Mapping[str, Cells]) -> None:
    """Draw a row of bar charts for each workload."""
    figure, rows = grid(len(workloads), len(_SHOWN))
    for (workload, cells), row in zip(workloads.items(), rows, strict=True):
        cases = [case for case in Case if any(measured is case for measured, _ in cells)]
        for (title, value), axes in zip(_SHOWN.items(), row, strict=True):
            for number, (knowledge, colour) in enumerate(_COLOURS.items()):
                places = [at + (number - 1.5) * _WIDTH for at in range(len(cases))]
                heights = [fmean(map(value, cells[case, knowledge])) for case in cases]
                axes.bar(places, heights, _WIDTH, color=colour, label=str(knowledge))
            axes.set_xticks(range(len(cases)), [str(case) for case in cases])
            finish(axes, f"{workload}: {title}")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=8)
    save(figure, path)
