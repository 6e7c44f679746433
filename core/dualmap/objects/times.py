"""Reads and writes the times of Kubernetes objects: RFC 3339 texts with a time zone."""

from datetime import UTC, datetime
from math import floor
from typing import Final

# The first second of the year 1 and the last of the year 9999, in UTC. RFC 3339 has no other years.
_FIRST_S: Final = -62_135_596_800
_LAST_S: Final = 253_402_300_799


def read_time(text: str) -> float | None:
    """Return an RFC 3339 time as seconds since the epoch, None if it is invalid."""
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        return None
    return None if time.tzinfo is None else time.timestamp()


def read_yaml_time(value: object) -> float | None:
    """Do the same as ``read_time`` for a value from YAML, which reads a time without quotes as a ``datetime``."""
    text = value.isoformat() if isinstance(value, datetime) else value
    return read_time(text) if isinstance(text, str) else None


def shown_time(time_s: float) -> int:
    """Return the time that ``time_text`` shows: whole seconds (rounded down), within the years 1 to 9999."""
    return min(max(floor(time_s), _FIRST_S), _LAST_S)


def time_text(time_s: float) -> str:
    """Return seconds since the epoch in the API's format: RFC 3339, UTC, whole seconds (rounded down)."""
    return datetime.fromtimestamp(shown_time(time_s), UTC).isoformat().replace("+00:00", "Z")
