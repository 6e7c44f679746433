"""One measurement of the evaluation: what is measured, under which name its figures are kept, and whose they are.

Neighbours: ``measures`` has the functions that cells call in other processes, ``results`` keeps what they return.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Figures = Mapping[str, Any]
"""What a measurement found, as JSON has it: units last in the names, null for what there is none of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One measurement. ``section`` and ``name`` identify it: the file its figures are in, and where in that file.

    Sections may use each other's cells; equal ones are measured once. ``policy`` is what ``--policies`` selects by.
    ``measure`` is called in another process, so it and what it is bound to can be pickled.
    """

    section: str
    name: str
    policy: str
    measure: Callable[[], Figures]
