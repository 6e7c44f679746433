"""Defines a cell, one measurement of the evaluation: the function to call, the location of its figures, its policy.

``measures`` has the functions that cells call in worker processes; ``results`` stores their figures.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Figures = Mapping[str, Any]
"""The figures of a measurement as JSON values. Names end with their units, and null stands for a missing value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One measurement. ``section`` is the file of its figures, and ``name`` the key in the file.

    Sections may use cells of other sections; equal cells are measured once. ``--policies`` selects cells by ``policy``.
    Another process calls ``measure``, so the function and its bound arguments must be picklable.
    """

    section: str
    name: str
    policy: str
    measure: Callable[[], Figures]
