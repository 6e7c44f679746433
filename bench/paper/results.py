"""Stores the measured figures as JSON: one file for each section, rewritten after every cell.

So a stopped run can continue, and tables can be redrawn without measurements. After a change, single policies can be
measured again. Each cell has the commit of the code that measured it.
"""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.paper.cells import Cell, Figures


class ResultsError(Exception):
    """A file of results cannot be read; the message contains the file and the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A cell's figures, the CPU seconds of the measurement, and the commit of the measured code."""

    figures: Figures
    cost_s: float
    commit: str


class Results:
    """The results in a directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._sections: dict[str, dict[str, Any]] = {}

    def get(self, cell: Cell) -> Measured | None:
        """Return the stored result of a cell, None if it is missing."""
        kept = self._section(cell.section).get(cell.name)
        return None if kept is None else Measured(**kept)

    def figures(self, cell: Cell) -> Figures | None:
        """Return the stored figures of a cell, None if they are missing."""
        measured = self.get(cell)
        return None if measured is None else measured.figures

    def measured(self, cells: Mapping[str, Cell]) -> dict[str, Figures]:
        """Return the stored figures of cells by name, without the missing ones."""
        return {name: figures for name, cell in cells.items() if (figures := self.figures(cell)) is not None}

    def put(self, cell: Cell, measured: Measured) -> None:
        """Store the result of a cell on disk immediately."""
        # In the meantime, another process may have written other cells of the section.
        self._sections.pop(cell.section, None)
        section = self._section(cell.section)
        section[cell.name] = {
            "figures": _without_nan(measured.figures),
            "cost_s": round(measured.cost_s, 1),
            "commit": measured.commit,
        }
        path = self._path(cell.section)
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = (f"{json.dumps(name)}: {json.dumps(section[name], allow_nan=False)}" for name in sorted(section))
        new = path.with_suffix(".new")
        new.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        os.replace(new, path)

    def _path(self, section: str) -> Path:
        return self._directory / f"{section}.json"

    def _section(self, section: str) -> dict[str, Any]:
        if section not in self._sections:
            path = self._path(section)
            try:
                self._sections[section] = json.loads(path.read_text()) if path.exists() else {}
            except ValueError as error:
                raise ResultsError(f"{path} cannot be read ({error}); repair or delete the file") from error
        return self._sections[section]


def _without_nan(value: Any) -> Any:
    """Return figures in the format for JSON: null for NaN, and six significant digits."""
    if isinstance(value, float):
        return None if math.isnan(value) else float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {key: _without_nan(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(each) for each in value]
    return value
