"""Defines one measurement of the evaluation: the function to call, where its figures are stored, and its policy.

``measures`` has the functions that cells call in worker processes; ``results`` stores their figures.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Figures = Mapping[str, Any]
"""A measurement's figures as JSON: names end with their units, and null means that there is no value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One measurement. ``section`` and ``name`` identify it: the file of its figures, and the place in that file.

    Sections may use each other's cells; equal ones are measured once. ``--policies`` selects cells by ``policy``.
    ``measure`` is called in another process, so the function and its bound arguments must be picklable.
    """

    section: str
    name: str
    policy: str
    measure: Callable[[], Figures]
