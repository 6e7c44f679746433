"""Checked access to the fields of a mapping: every error names the field's path, its value and the accepted values."""

import re
from collections.abc import Iterable, Mapping
from ipaddress import IPv6Address
from math import inf
from typing import Final

from dualmap.errors import PoolError
from dualmap.objects.times import TIME_ACCEPTED, read_yaml_time

UNLIMITED: Final = "Unlimited"
_DURATION: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h)", re.ASCII)
_BRACKETED: Final = re.compile(r"//\[([^]]*)\]")
_QUERY: Final = re.compile(r"[?#]")
_UNIT_S: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


def parse_duration(value: object, field: str, *, low_s: float = 0.001, high_s: float = 86_400.0) -> float:
    """Return a duration such as ``500ms``, ``5s``, ``10m`` or ``1h`` in seconds; raise PoolError for ``field``."""
    accepted = f"a number and a unit (ms, s, m or h) from {_spell_s(low_s)} to {_spell_s(high_s)}, such as 5s"
    match = _DURATION.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise PoolError(field, value, accepted)
    seconds = float(match[1]) * _UNIT_S[match[2]]
    if not low_s <= seconds <= high_s:
        raise PoolError(field, value, accepted)
    return seconds


class Fields:
    """A mapping and its path. Each method returns one checked field, or raises PoolError with the field's path."""

    def __init__(self, value: object, path: str) -> None:
        if value is None and path:
            value = {}  # In YAML, `slo:` without a value is null.
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise PoolError(path or "document", value, "a mapping of field names to values")
        self.raw: Mapping[str, object] = value
        self.path = path
        self._seen: set[str] = set()

    def at(self, name: str) -> str:
        """Return the path of a field."""
        shown = _shown_name(name)
        return f"{self.path}.{shown}" if self.path else shown

    def get(self, name: str) -> object:
        """Return a field as it is; None if it is missing."""
        self._seen.add(name)
        return self.raw.get(name)

    def refuse_others(self) -> None:
        """Raise PoolError for a field that no method has read."""
        for name in self.raw:
            if name not in self._seen:
                raise PoolError(self.at(name), self.raw[name], f"one of the fields {', '.join(sorted(self._seen))}")

    def sub(self, name: str) -> "Fields":
        """Return the fields of a mapping; a missing one has none."""
        return Fields(self.get(name), self.at(name))

    def items(self, name: str) -> list["Fields"]:
        """Return the fields of each mapping in a list."""
        value = self.get(name)
        if value is None:
            return []
        if not isinstance(value, list):
            raise PoolError(self.at(name), value, "a list")
        fields = []
        for position, item in enumerate(value):
            path = f"{self.at(name)}[{position}]"
            if item is None:
                raise PoolError(path, item, "a mapping of field names to values")
            fields.append(Fields(item, path))
        return fields

    def text(self, name: str, default: str | None = None, *, longest: int = 253) -> str:
        """Return a text that is not empty; without ``default``, it must be there."""
        value = self.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, str) or not 0 < len(value) <= longest:
            raise PoolError(self.at(name), value, f"a text of 1 to {longest} characters")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """Return a list of names."""
        value = self.get(name)
        if value is None:
            return ()
        if not isinstance(value, list):
            raise PoolError(self.at(name), value, "a list of names")
        for position, text in enumerate(value):
            if not isinstance(text, str) or not 0 < len(text) <= 253:
                raise PoolError(f"{self.at(name)}[{position}]", text, "a text of 1 to 253 characters")
        return tuple(value)

    def matching(self, name: str, pattern: re.Pattern[str], accepted: str, default: str | None = None) -> str:
        """Return a text that matches a pattern completely; ``accepted`` describes the pattern."""
        value = self.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, str) or not pattern.fullmatch(value):
            raise PoolError(self.at(name), value, accepted)
        return value

    def address(self, name: str, pattern: re.Pattern[str], accepted: str) -> str:
        """Return a URL that matches a pattern completely; errors quote no user, password, query and fragment.

        A host in brackets must be an IPv6 address, which patterns do not check.
        """
        value = self.get(name)
        if not isinstance(value, str) or not pattern.fullmatch(value) or not _has_sound_brackets(value):
            raise PoolError(self.at(name), without_secrets(value), accepted)
        return value

    def choice(self, name: str, default: str, options: Iterable[str]) -> str:
        """Return one of some texts."""
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, str) or value not in options:
            raise PoolError(self.at(name), value, f"one of {', '.join(options)}")
        return value

    def flag(self, name: str, *, default: bool) -> bool:
        """Return true or false."""
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise PoolError(self.at(name), value, "true or false")
        return value

    def integer(self, name: str, default: int | None, low: int, high: int) -> int:
        """Return a whole number from ``low`` to ``high``; without ``default``, it must be there."""
        value = self.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise PoolError(self.at(name), value, f"a whole number from {low} to {high}")
        return value

    def number(self, name: str, default: float, low: float, high: float) -> float:
        """Return a number from ``low`` to ``high``."""
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
            raise PoolError(self.at(name), value, f"a number from {low:g} to {high:g}")
        return float(value)

    def duration(self, name: str, default_s: float, *, low_s: float, high_s: float, unlimited: bool = False) -> float:
        """Return a duration in seconds; infinity for UNLIMITED, if that is accepted."""
        value = self.get(name)
        if value is None:
            return default_s
        if unlimited and value == UNLIMITED:
            return inf
        try:
            return parse_duration(value, self.at(name), low_s=low_s, high_s=high_s)
        except PoolError as error:
            accepted = f"{error.accepted}, or {UNLIMITED}" if unlimited else error.accepted
            raise PoolError(error.field, value, accepted) from None

    def time(self, name: str) -> float | None:
        """Return an RFC 3339 time as seconds since the epoch; None if it is missing."""
        value = self.get(name)
        if value is None:
            return None
        time_s = read_yaml_time(value)
        if time_s is None:
            raise PoolError(self.at(name), value, TIME_ACCEPTED)
        return time_s


def _has_sound_brackets(url: str) -> bool:
    bracketed = _BRACKETED.search(url)
    if bracketed is None:
        return True
    try:
        IPv6Address(bracketed[1])
    except ValueError:
        return False
    return True


def without_secrets(address: object) -> object:
    """Return an address with ``***`` for its user, password, query and fragment; other values than texts as they are.

    Errors go to logs and conditions. The address is invalid, so it may have any form: everything before the last ``@``
    counts as user and password.
    """
    if not isinstance(address, str):
        return address
    _, at, rest = address.rpartition("@")
    shown = f"***@{rest}" if at else address
    query = _QUERY.search(shown)
    return shown if query is None else f"{shown[: query.end()]}***"


def _shown_name(name: str) -> str:
    """Return a field's name as a short printable line, because an unknown field may have any name."""
    shown = name if name.isprintable() else repr(name)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."


def _spell_s(seconds: float) -> str:
    """Return a limit in the pool's format for durations."""
    for unit in ("h", "m", "s"):
        if seconds >= _UNIT_S[unit] and seconds % _UNIT_S[unit] == 0:
            return f"{seconds / _UNIT_S[unit]:g}{unit}"
    return f"{seconds * 1000:g}ms"
