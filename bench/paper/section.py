"""What a section of the evaluation is; ``sections`` has them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.paper.cells import Cell
from bench.paper.claims import Claim
from bench.paper.results import Results
from bench.paper.settings import Extent


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of the evaluation.

    ``cells`` are what it needs measured, ``page`` makes Markdown of what was and may draw plots into the directory that
    it is given, ``claims`` are what the sources say about it beside what was measured. What is not measured yet is left
    out or shown as "-".
    """

    name: str
    title: str
    cells: Callable[[Extent], Sequence[Cell]]
    page: Callable[[Results, Extent, Path], str]
    claims: Callable[[Results, Extent], Sequence[Claim]]
