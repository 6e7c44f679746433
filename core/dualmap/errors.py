"""The exceptions of the core.

::

    DualMapError
    ├── PoolError        a field of an InferencePool is not accepted (its author corrects it)
    └── BadRequest       a request body cannot be routed (the client corrects it)

The application that catches an exception maps it to an HTTP status or exit code.
"""

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Final

_SHOWN_LENGTH: Final = 80
_SHOWN_ITEMS: Final = 20
_SHOWN_DEPTH: Final = 4


class DualMapError(Exception):
    """The base class of the core's exceptions; the core raises subclasses only."""


class PoolError(DualMapError):
    """A field of an InferencePool has an invalid value.

    ``str()`` returns a message for users with the field, the value and the accepted values. ``shown`` is the value as
    in YAML, with at most 80 characters.
    """

    def __init__(self, field: str, value: object, accepted: str) -> None:
        self.field = field
        self.value = value
        self.accepted = accepted
        self.shown = _shown(value)
        super().__init__(f"{field}: {self.shown} is not accepted; give {accepted}")


class BadRequest(DualMapError):
    """A request body that cannot be routed. The client receives the message; ``param`` is the field's name."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        self.param = param
        super().__init__(message)


def _shown(value: object) -> str:
    """Return a value as text for an error message, with at most 80 characters."""
    if value is None:
        return "nothing"
    text = _yaml(value, _SHOWN_DEPTH)
    return text if len(text) <= _SHOWN_LENGTH else f"{text[: _SHOWN_LENGTH - 3]}..."


def _yaml(value: object, depth: int) -> str:
    """Return a value in YAML's words, because users write YAML; of lists and mappings, the beginning."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case Mapping():
            pairs = (f"{_yaml(key, depth - 1)}: {_yaml(item, depth - 1)}" for key, item in value.items())
            return f"{{{_joined(pairs, depth)}}}"
        case list():
            return f"[{_joined((_yaml(item, depth - 1) for item in value), depth)}]"
        case _:
            # The core imports no clock, so it knows dates by their method.
            isoformat = getattr(value, "isoformat", None)
            return str(isoformat()) if callable(isoformat) else repr(value)


def _joined(items: Iterable[str], depth: int) -> str:
    return ", ".join(islice(items, _SHOWN_ITEMS)) if depth > 0 else "..."
