"""Reads fields of a picker's configuration as llm-d does: an unknown field or another type is an error.

A field without a value counts as absent.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Final

from dualmap.errors import PoolError

_SHOWN_LENGTH: Final = 80


def mapping_at(fields: Mapping[str, object], key: str, place: str, accepted: Collection[str]) -> Mapping[str, object]:
    """Return the mapping in ``fields[key]`` with the names that are ``accepted``, empty if absent. Raises PoolError."""
    value = fields.get(key)
    field = f"{place}.{key}"
    return {} if value is None else checked_mapping(value, field, accepted, f"a field of {field}")


def checked_mapping(value: object, field: str, accepted: Collection[str], what: str) -> Mapping[str, object]:
    """Return a mapping with the names that are ``accepted``; ``what`` says what a name is. Raises PoolError."""
    mapping = any_mapping(value, field, f"a mapping with {', '.join(sorted(accepted))}")
    for name, found in mapping.items():
        if name not in accepted:
            raise PoolError(f"{field}.{name[:_SHOWN_LENGTH]}", found, f"{what}: {', '.join(sorted(accepted))}")
    return mapping


def any_mapping(
    value: object, field: str, accepted: str = "a mapping of field names to values"
) -> Mapping[str, object]:
    """Return a mapping with any names. Raises PoolError."""
    if not isinstance(value, Mapping):
        raise PoolError(field, value, accepted)
    return {str(name): found for name, found in value.items()}


def list_at(fields: Mapping[str, object], key: str, place: str, accepted: str) -> Sequence[object]:
    """Return the list in ``fields[key]``, empty if absent. Raises PoolError."""
    value = fields.get(key)
    if value is None:
        return ()
    if not isinstance(value, list):
        raise PoolError(f"{place}{key}", value, accepted)
    return value


def text_at(fields: Mapping[str, object], key: str, place: str, default: str = "") -> str:
    """Return the text in ``fields[key]``, the default if it is absent or empty. Raises PoolError."""
    value = fields.get(key)
    if value is None:
        return default
    if not isinstance(value, str):
        raise PoolError(f"{place}.{key}", value, "text")
    return value or default
