"""Reads and writes the ConfigMap that reserves model names for namespaces.

Without reservations, a pool in any namespace gets the requests for a model name while no older pool has the name. The
operator therefore reserves each name that was served, and the routers route a reserved name only to its namespace.

The ConfigMap's data has one key for each namespace. The value contains the namespace's names, one in each line. The
operator writes these keys. The chart writes the keys with the prefix ``fixed.``, which have precedence. No function
raises: an invalid value counts as absent.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

CONFIG_MAP: Final = "dualmap-models"
"""The ConfigMap's name; it is in the operator's namespace."""
# No namespace's key begins with this prefix, because a namespace's name contains no dot.
_FIXED: Final = "fixed."


def read_reservations(data: Mapping[str, Any]) -> dict[str, str]:
    """Return the namespace of each reserved model name; the first namespace in alphabetical order gets a name."""
    reserved: dict[str, str] = {}
    for key in sorted(data, key=lambda key: (not key.startswith(_FIXED), key)):
        value = data[key]
        for name in names_in(value) if isinstance(value, str) else ():
            reserved.setdefault(name, key.removeprefix(_FIXED))
    return reserved


def names_in(text: str) -> tuple[str, ...]:
    """Return the names in one value of the ConfigMap."""
    return tuple(name for line in text.split("\n") if (name := line.strip()))


def names_text(names: Iterable[str]) -> str:
    """Return the value of the ConfigMap for ``names``."""
    return "".join(f"{name}\n" for name in names)


def can_be_reserved(name: str) -> bool:
    """Return whether the ConfigMap can contain a name: the name has no line break and no outer white space."""
    return names_in(name) == (name,)
