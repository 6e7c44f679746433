"""Defines a section of the evaluation; ``sections`` contains all sections."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.paper.cells import Cell
from bench.paper.claims import Claim
from bench.paper.results import Results
from bench.paper.settings import Extent


def _none(_results: Results, _extent: Extent) -> Sequence[Claim]:
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A section of the evaluation.

    ``cells`` returns the measurements of the section. ``page`` returns a Markdown page of the results, and may draw
    plots into the given directory. ``claims`` returns the sources' claims next to the measurements, by default none.
    ``excerpts`` are parts of docs/evaluation.md by name, in Markdown. Missing measurements are left out or shown as
    "-".
    """

    name: str
    title: str
    cells: Callable[[Extent], Sequence[Cell]]
    page: Callable[[Results, Extent, Path], str]
    claims: Callable[[Results, Extent], Sequence[Claim]] = _none
    excerpts: Mapping[str, Callable[[Results, Extent], str]] = field(default_factory=dict)
