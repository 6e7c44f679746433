"""Checked access to the fields of a line: every error names the field, its value and what the format has there."""

from collections.abc import Mapping
from enum import StrEnum
from math import isfinite
from typing import Final, TypeVar

from dualmap.recordings.errors import InvalidField

TOKENS_MAX: Final = 10**9
"""The largest count of tokens."""
SECONDS_MAX: Final = 1e8
"""The longest time between two events."""
EPOCH_S_MAX: Final = 1e11
"""The last time since the epoch."""
HASH_DIGITS: Final = 16
"""The hex digits of a hash."""

_NameT = TypeVar("_NameT", bound=StrEnum)


class Fields:
    """The fields of one JSON object at ``path``. Each method returns a checked field, or raises InvalidField."""

    def __init__(self, raw: object, path: str = "") -> None:
        if not isinstance(raw, Mapping):
            raise InvalidField(path or "line", raw, "a JSON object")
        self.raw: Mapping[str, object] = raw
        self.path = path

    def at(self, name: str) -> str:
        """Return the path of a field."""
        return f"{self.path}.{name}" if self.path else name

    def sub(self, name: str) -> "Fields | None":
        """Return the fields of an object; None if it is missing."""
        value = self.raw.get(name)
        return None if value is None else Fields(value, self.at(name))

    def subs(self, name: str) -> tuple["Fields", ...]:
        """Return the fields of each object in a list; empty if it is missing."""
        return tuple(Fields(each, f"{self.at(name)}[{i}]") for i, each in enumerate(self._list(name)))

    def text(self, name: str, default: str | None = None) -> str:
        """Return a text; without ``default``, it must be there and not empty."""
        value = self.raw.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, str) or (not value and default is None):
            raise InvalidField(self.at(name), value, "a text" if default is not None else "a text that is not empty")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """Return a list of texts; empty if it is missing."""
        values = self._list(name)
        if not all(isinstance(each, str) for each in values):
            raise InvalidField(self.at(name), values, "a list of texts")
        return tuple(str(each) for each in values)

    def name(self, name: str, names: type[_NameT]) -> _NameT:
        """Return one of an enumeration's names."""
        value = self.raw.get(name)
        try:
            return names(str(value))
        except ValueError:
            raise InvalidField(self.at(name), value, f"one of {', '.join(names)}") from None

    def flag(self, name: str, default: bool | None = None) -> bool:
        """Return true or false; without ``default``, it must be there."""
        value = self.raw.get(name, default)
        if not isinstance(value, bool):
            raise InvalidField(self.at(name), value, "true or false")
        return value

    def number(self, name: str, *, low: float = 0.0, high: float = SECONDS_MAX) -> float:
        """Return a number from ``low`` to ``high``."""
        value = self.raw.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise InvalidField(self.at(name), value, f"a number from {low:g} to {high:g}")
        if not isfinite(value):
            raise InvalidField(self.at(name), value, "a finite number")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        """Return a number; None if it is missing."""
        return None if self.raw.get(name) is None else self.number(name)

    def integer(self, name: str, default: int | None = None, *, low: int = 0, high: int = TOKENS_MAX) -> int:
        """Return a whole number from ``low`` to ``high``; without ``default``, it must be there."""
        value = self.raw.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise InvalidField(self.at(name), value, f"a whole number from {low} to {high}")
        return value

    def optional_integer(self, name: str, *, low: int = 0) -> int | None:
        """Return a whole number; None if it is missing."""
        return None if self.raw.get(name) is None else self.integer(name, low=low)

    def hash(self, name: str) -> int | None:
        """Return a hash; None if it is missing."""
        value = self.raw.get(name)
        if value is None:
            return None
        hashes = self._hashes(name, value)
        if len(hashes) != 1:
            raise InvalidField(self.at(name), value, f"a hash of {HASH_DIGITS} hex digits")
        return hashes[0]

    def hashes(self, name: str, *, most: int) -> tuple[int, ...]:
        """Return the hashes that a text consists of, at most ``most``."""
        value = self.raw.get(name)
        hashes = self._hashes(name, value)
        if len(hashes) > most:
            raise InvalidField(self.at(name), value, f"at most {most} hashes")
        return hashes

    def _hashes(self, name: str, value: object) -> tuple[int, ...]:
        accepted = f"hashes of {HASH_DIGITS} hex digits each, one after the other"
        if not isinstance(value, str) or len(value) % HASH_DIGITS:
            raise InvalidField(self.at(name), value, accepted)
        try:
            packed = bytes.fromhex(value)
        except ValueError:
            packed = b""
        # ``fromhex`` ignores spaces.
        if len(packed) * 2 != len(value):
            raise InvalidField(self.at(name), value, accepted)
        return tuple(int.from_bytes(packed[i : i + 8]) for i in range(0, len(packed), 8))

    def _list(self, name: str) -> list[object]:
        value = self.raw.get(name, [])
        if not isinstance(value, list):
            raise InvalidField(self.at(name), value, "a list")
        return value
