"""Every error the core raises, in one tree.

::

    DualMapError
    ├── PoolError        a field of an InferencePool is not accepted (its author corrects it)
    └── BadRequest       a request body cannot be routed (the client corrects it)

The application that catches an error maps it to an HTTP status or exit code.
"""


class DualMapError(Exception):
    """The root of the core's errors; never raised itself."""


class PoolError(DualMapError):
    """A field of an InferencePool holds a value that is not accepted.

    ``str()`` names the field, the value and what is accepted, so that it can be shown as it is.
    """

    def __init__(self, field: str, value: object, accepted: str) -> None:
        self.field = field
        self.value = value
        self.accepted = accepted
        super().__init__(f"{field}: {_shown(value)} is not accepted; give {accepted}")


class BadRequest(DualMapError):
    """A request body that cannot be routed; the message is meant for the client. ``param`` names the field."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        self.param = param
        super().__init__(message)


def _shown(value: object) -> str:
    """Return a value as an error message quotes it, cut where it grows long."""
    if value is None:
        return "nothing"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
