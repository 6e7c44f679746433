"""Errors of the operator.

    OperatorError
    |-- ApiError            the API server refused a request or did not answer
    |   |-- ConflictError   the object has changed since it was read: observe again
    |   |-- GoneError       the object no longer exists
    |   `-- NotLeadingError nothing was sent: this operator may not write
    |-- ControlError        a part of the operator ended by itself (``run.control``)
    `-- LeadershipLostError the lease was not renewed (``run.leader``)

An error in a user's object is a ``dualmap.errors.PoolError``, which names field, value and what is accepted.
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
