"""What can go wrong on the control plane.

    OperatorError
    |-- ApiError            the API server refused a request, or could not be reached
    |   |-- ConflictError   the object has changed since it was read: gather again
    |   |-- GoneError       the object is no longer there
    |   `-- NotLeadingError nothing was sent: this operator may not write any more
    `-- SettingsError       the command line or the environment asks for what cannot be done

What is wrong with a user's object is a ``dualmap.errors.PoolError``, which names field, value and what is accepted.
"""


class OperatorError(Exception):
    """Anything that keeps the operator from what it was to do."""


class ApiError(OperatorError):
    """The API server refused (``status`` is its HTTP status) or was not reached (``status`` 0)."""

    def __init__(self, message: str, *, status: int = 0) -> None:
        self.status = status
        super().__init__(message)


class ConflictError(ApiError):
    """The object has changed since it was read."""


class GoneError(ApiError):
    """The object does not exist any more."""


class NotLeadingError(ApiError):
    """Nothing was sent, since another operator may act by now."""


class SettingsError(OperatorError):
    """What was asked for on the command line cannot be done, with the reason in words."""
