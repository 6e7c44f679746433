"""Reduces a corpus to a few inputs that together take the same branches, and as often, as all inputs."""

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Final, TypeAlias

import dualmap
import dualmap_extproc
from fuzz import targets
from fuzz.engine import inputs, name_of

# Maximum size of a corpus. A run that starts from the corpus finds the remaining branches again.
INPUTS: Final = 50
_PACKAGES: Final = tuple(f"{folder}/" for package in (dualmap, dualmap_extproc) for folder in package.__path__)

# A step from one line of a file to another line; line 0 stands for a function's entry.
_Branch: TypeAlias = tuple[str, int, int]
# A branch, and the number of bits of its count, so that a second iteration of a loop counts as new.
_Feature: TypeAlias = tuple[_Branch, int]


def minimise(name: str, kept: Path, found: Path) -> tuple[int, int, int]:
    """Select the best INPUTS of the folders ``kept`` and ``found``, and leave only these in ``kept``.

    Return the number of kept inputs, the number of all inputs, and the bytes of the kept inputs. An input whose check
    fails is left out; add the input to the corpus after its fault is fixed.
    """
    kept.mkdir(parents=True, exist_ok=True)
    check = targets.load(name).check
    candidates = inputs(kept, found) if found.is_dir() else inputs(kept)
    reached = [(data, features) for data in candidates if (features := _features(check, data)) is not None]
    chosen: list[bytes] = []
    covered: set[_Feature] = set()
    while len(chosen) < INPUTS:
        # Among equal inputs, the first is the smallest.
        data, features = max(reached, key=lambda each: len(each[1] - covered), default=(b"", set()))
        if features <= covered:
            break
        chosen.append(data)
        covered |= features
    for path in kept.iterdir():
        path.unlink()
    for data in chosen:
        (kept / name_of(data)).write_bytes(data)
    return len(chosen), len(candidates), sum(map(len, chosen))


def _features(check: Callable[[bytes], None], data: bytes) -> set[_Feature] | None:
    """Return the branches that an input reaches in the packages under test, None if its check fails."""
    seen: Counter[_Branch] = Counter()
    last: dict[FrameType, int] = {}

    def trace(frame: FrameType, event: str, _: object) -> Any:
        file = frame.f_code.co_filename
        if not file.startswith(_PACKAGES):
            return None
        if event == "line":
            seen[file, last.get(frame, 0), frame.f_lineno] += 1
            last[frame] = frame.f_lineno
        elif event == "return":
            last.pop(frame, None)
        return trace

    sys.settrace(trace)
    try:
        check(data)
    except Exception:  # noqa: BLE001  # Any exception is a finding; the run that found the input has reported it.
        return None
    finally:
        sys.settrace(None)
    return {(branch, times.bit_length()) for branch, times in seen.items()}
