"""What a section of the evaluation is; ``sections`` has them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.paper.cells import Cell
from bench.paper.results import Results
from bench.paper.settings import Extent


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of the evaluation: ``cells`` are what it needs measured, ``page`` makes Markdown of what was.

    ``page`` may draw plots into the directory that it is given; what is not measured yet it leaves out or shows as "-".
    """

    name: str
    title: str
    cells: Callable[[Extent], Sequence[Cell]]
    page: Callable[[Results, Extent, Path], str]
