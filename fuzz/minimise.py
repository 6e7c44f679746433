"""A corpus that reaches what a larger one does: the smallest inputs that between them take every branch."""

import sys
from pathlib import Path
from types import FrameType
from typing import Any, Final, TypeAlias

from fuzz import targets
from fuzz.engine import inputs, name_of

# Enough to begin from; whatever else there is to reach, a run reaches again.
INPUTS: Final = 60
_PACKAGES: Final = ("/dualmap/", "/dualmap_extproc/")

# From one line of a file to another; line 0 is a function's entry.
_Branch: TypeAlias = tuple[str, int, int]


def minimise(name: str, kept: Path, found: Path) -> tuple[int, int, int]:
    """Make ``kept`` the best INPUTS of its own and those ``found``; return how many, of how many, and their bytes.

    An input whose check fails is left out: it belongs into the corpus once what it found is mended.
    """
    kept.mkdir(parents=True, exist_ok=True)
    check = targets.load(name).check
    candidates = inputs(kept, found) if found.is_dir() else inputs(kept)
    reached = [(data, branches) for data in candidates if (branches := _branches(check, data)) is not None]
    chosen: list[bytes] = []
    covered: set[_Branch] = set()
    while len(chosen) < INPUTS:
        # The first of equals is the smallest.
        data, branches = max(reached, key=lambda each: len(each[1] - covered), default=(b"", set()))
        if branches <= covered:
            break
        chosen.append(data)
        covered |= branches
    for path in kept.iterdir():
        path.unlink()
    for data in chosen:
        (kept / name_of(data)).write_bytes(data)
    return len(chosen), len(candidates), sum(map(len, chosen))


def _branches(check: Any, data: bytes) -> set[_Branch] | None:
    """Return the branches taken in the packages under test; None when the check fails."""
    seen: set[_Branch] = set()
    last: dict[FrameType, int] = {}

    def trace(frame: FrameType, event: str, _: object) -> Any:
        file = frame.f_code.co_filename
        if not any(package in file for package in _PACKAGES):
            return None
        if event == "line":
            seen.add((file, last.get(frame, 0), frame.f_lineno))
            last[frame] = frame.f_lineno
        elif event == "return":
            last.pop(frame, None)
        return trace

    sys.settrace(trace)
    try:
        check(data)
    except Exception:  # noqa: BLE001  # Whatever it is, it is a finding, and told by the run that found it.
        return None
    finally:
        sys.settrace(None)
    return seen
