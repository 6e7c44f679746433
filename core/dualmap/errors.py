"""The exceptions of the core.

::

    DualMapError
    ├── PoolError        a field of an InferencePool is not accepted (its author corrects it)
    └── BadRequest       a request body cannot be routed (the client corrects it)

The application that catches an exception maps it to an HTTP status or exit code.
"""


class DualMapError(Exception):
    """The base class of the core's exceptions; the core raises subclasses only."""


class PoolError(DualMapError):
    """A field of an InferencePool has an invalid value.

    ``str()`` returns a message for users with the field, the value and the accepted values.
    """

    def __init__(self, field: str, value: object, accepted: str) -> None:
        self.field = field
        self.value = value
        self.accepted = accepted
        super().__init__(f"{field}: {_shown(value)} is not accepted; give {accepted}")


class BadRequest(DualMapError):
    """A request body that cannot be routed. The client receives the message; ``param`` is the field's name."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        self.param = param
        super().__init__(message)


def _shown(value: object) -> str:
    """Return a value as text for an error message, with at most 80 characters."""
    if value is None:
        return "nothing"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
