"""Errors of the operator.

    OperatorError
    |-- ApiError            the API server refused a request or did not answer
    |   |-- ConflictError   the object has changed since it was read
    |   |-- GoneError       the object no longer exists
    |   `-- NotLeadingError the request was not sent: this operator may not write
    |-- ControlError        a watch or kopf ended unexpectedly (``run.control``)
    `-- LeadershipLostError the lease was not renewed (``run.leader``)

An error in a user's object is a ``dualmap.errors.PoolError`` with the field, its value and the accepted values.
"""


class OperatorError(Exception):
    """Base of the operator's errors."""


class ApiError(OperatorError):
    """The API server refused a request (``status`` is the HTTP status) or did not answer (``status`` 0)."""

    def __init__(self, message: str, *, status: int = 0) -> None:
        self.status = status
        super().__init__(message)


class ConflictError(ApiError):
    """The object has changed since it was read."""


class GoneError(ApiError):
    """The object no longer exists."""


class NotLeadingError(ApiError):
    """The request was not sent: another operator may be the leader."""
