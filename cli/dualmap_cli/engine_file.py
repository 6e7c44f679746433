"""Writes and reads the file of an engine: the parameters that ``dualmap fit`` found, for ``--engine``.

A file with nothing but ``parameters`` is valid, so that it can be written by hand.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeGuard

import yaml

from dualmap_cli.simulate.engine_options import PARAMETERS
from dualmap_sim.fitting.estimates import EngineFit, Estimate, Verdict

_DIGITS: Final = 6
_FIELDS: Final = ("value", "low", "high", "verdict", "reason")
_TIMES: Final = ("o", "a", "d0", "d1", "d2")
_SIZES_OF_STEPS: Final = ("block", "chunk")
"""More of these is neither slower nor faster."""
BYTES_MOST: Final = 4 * 1024 * 1024


class EngineFileError(Exception):
    """A file is not that of an engine; ``str()`` names the file, the field, and the accepted values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFile:
    """The values of an engine's parameters, and those of the members that differ. Absent ones are left out.

    ``slowest`` and ``fastest`` are the ends of the intervals with which the engine is slow and fast. A missing end is
    the value itself. ``unbounded`` are the names of the parameters with a missing end.
    """

    parameters: tuple[tuple[str, float], ...]
    slowest: tuple[tuple[str, float], ...]
    fastest: tuple[tuple[str, float], ...]
    unbounded: tuple[str, ...]
    members: Mapping[str, tuple[tuple[str, float], ...]]


def engine_document(fit: EngineFit) -> dict[str, object]:
    """Return the content of an engine's file."""
    document: dict[str, object] = {"pool": fit.pool, "requests": fit.requests}
    document["parameters"] = _estimates(fit.parameters)
    if fit.members:
        document["members"] = {name: {"parameters": _estimates(own)} for name, own in fit.members.items()}
    return document


def engine_lines(fit: EngineFit) -> Iterator[str]:
    """Yield the lines of an engine's file."""
    yield "# Written by `dualmap fit`. `dualmap simulate --engine` takes absent parameters from --model.\n"
    yield yaml.safe_dump(engine_document(fit), sort_keys=False, width=120)


def read_engine(path: Path) -> EngineFile:
    """Read an engine's file. Raises EngineFileError."""
    try:
        data = path.read_bytes()
        if len(data) > BYTES_MOST:
            raise EngineFileError(f"{path} has {len(data):,} bytes; give a file of `dualmap fit`")
        document = yaml.safe_load(data)
    except OSError as error:
        raise EngineFileError(f"{path}: {error.strerror}; give a file of `dualmap fit`") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        what = " ".join(str(error).split())[:200]
        raise EngineFileError(f"{path}: {what}; give the YAML of `dualmap fit`") from error
    fields = _mapping(path, "", document)
    members = _mapping(path, "members", fields.get("members") or {})
    parameters = fields.get("parameters")
    values = _values(path, "parameters", parameters)
    return EngineFile(
        parameters=values,
        slowest=_values(path, "parameters", parameters, end={True: "high", False: "low"}),
        fastest=_values(path, "parameters", parameters, end={True: "low", False: "high"}),
        unbounded=tuple(name for name, _ in values if _is_unbounded(name, _mapping(path, "parameters", parameters))),
        members={
            str(name): _values(
                path, f"members.{name}.parameters", _mapping(path, f"members.{name}", own).get("parameters")
            )
            for name, own in members.items()
        },
    )


def _estimates(estimates: Mapping[str, Estimate]) -> dict[str, object]:
    return {
        name: {
            "value": _rounded(each.value),
            "low": _rounded(each.low),
            "high": _rounded(each.high),
            "verdict": str(each.verdict),
            "reason": each.reason,
        }
        for name, each in estimates.items()
    }


def _rounded(value: float | None) -> float | int | None:
    if value is None:
        return None
    rounded = float(f"{value:.{_DIGITS}g}")
    return int(rounded) if rounded == int(rounded) else rounded


def _values(
    path: Path, where: str, found: object, *, end: Mapping[bool, str] | None = None
) -> tuple[tuple[str, float], ...]:
    """Return the parameters that have a value, or those ends of their intervals. Raises EngineFileError.

    ``end`` has the field of a parameter by whether it is a time, of which more is slower.
    """
    values = []
    for name, each in _mapping(path, where, found).items():
        value = _value(path, f"{where}.{name}", name, each)
        if value is None:
            continue
        bound = None if end is None else each.get(end[name in _TIMES])
        if bound is not None and not _is_number(bound):
            raise EngineFileError(f"{path}: {where}.{name}: {bound!r} is not accepted; give a number or null")
        low, high = each.get("low"), each.get("high")
        if _is_number(low) and _is_number(high) and low > high:
            raise EngineFileError(f"{path}: {where}.{name}: low {low} is above high {high}; exchange them")
        if bound is not None and name not in _SIZES_OF_STEPS:
            # An interval may be wider than what simulations accept.
            value = min(max(float(bound), PARAMETERS[name].least), PARAMETERS[name].most)
        values.append((name, round(value) if PARAMETERS[name].whole and end is not None else value))
    return tuple(values)


def _is_unbounded(name: str, parameters: Mapping[Any, Any]) -> bool:
    return name not in _SIZES_OF_STEPS and not all(_is_number(parameters[name].get(end)) for end in ("low", "high"))


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _value(path: Path, where: str, name: object, found: object) -> float | None:
    if name not in PARAMETERS:
        raise EngineFileError(f"{path}: {where} is not a parameter; give some of {', '.join(PARAMETERS)}")
    fields = _mapping(path, where, found)
    for field in fields:
        if field not in _FIELDS:
            raise EngineFileError(f"{path}: {where}.{field} is not a field; give {', '.join(_FIELDS)}")
    verdict = fields.get("verdict")
    if verdict not in list(Verdict):
        raise EngineFileError(f"{path}: {where}.verdict: {verdict!r} is not accepted; give {', '.join(Verdict)}")
    value = fields.get("value")
    if verdict == Verdict.ABSENT:
        return None
    if not _is_number(value):
        raise EngineFileError(f"{path}: {where}.value: {value!r} is not accepted; give a number")
    return float(value)


def _mapping(path: Path, where: str, found: object) -> Mapping[Any, Any]:
    if not isinstance(found, dict):
        what = where or "the document"
        raise EngineFileError(f"{path}: {what} is {'missing' if found is None else 'no mapping'}; see `dualmap fit`")
    return found
