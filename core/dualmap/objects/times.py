"""Reads and writes the times of Kubernetes objects: RFC 3339 texts with a time zone."""

import re
from datetime import UTC, datetime
from math import floor
from typing import Final

# The first second of the year 1 and the last of the year 9999, in UTC. RFC 3339 has no other years.
_FIRST_S: Final = -62_135_596_800
_LAST_S: Final = 253_402_300_799
# Python also reads other forms of ISO 8601, which the API server refuses.
_RFC_3339: Final = re.compile(
    r"\d{4}-\d\d-\d\d[Tt]([01]\d|2[0-3]):\d\d:\d\d(\.\d+)?([Zz]|[+-]\d\d:\d\d)",
    re.ASCII,
)
TIME_ACCEPTED: Final = (
    "a time as YYYY-MM-DDTHH:MM:SS with the time zone Z or +HH:MM, such as 2026-11-27T21:00:00Z, "
    "from the year 1 on and without leap seconds"
)
"""What ``read_time`` accepts, for messages to users."""


def read_time(text: str) -> float | None:
    """Return an RFC 3339 time as seconds since the epoch, None if it is invalid or a leap second."""
    if not _RFC_3339.fullmatch(text):
        return None
    try:
        return datetime.fromisoformat(text.upper()).timestamp()
    except ValueError:
        return None


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
