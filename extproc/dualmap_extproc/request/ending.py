"""How a request ended, as its HTTP status tells: one rule for ``stream``, which sees the response, and ``access_log``.

``picker`` closes a request's books by it, and ``metrics`` counts each kind by its name.
"""

from enum import Enum
from typing import Final

# Statuses below 500 by which an instance says that it is slow or full, not that the request is wrong.
_OVERLOAD_STATUSES: Final = (408, 429)


class Ending(Enum):
    """What became of a request that an instance was chosen for."""

    FINISHED = "finished"
    """The engine did what it was asked, and the response is complete."""
    REJECTED = "rejected"
    """The engine did not take the request, which it says is wrong; nothing was prefilled."""
    ABORTED = "aborted"
    """Cancelled by the client, broken off for no fault of the instance's, or put off by one that is full."""
    FAILED = "failed"
    """The instance failed: it answered 5xx, refused the connection, or broke off."""


def ending_of(status: int | None) -> Ending:
    """Return what a response's HTTP status says; None stands for a response that had none.

    Success (2xx) and redirection (3xx) is what was asked for; 4xx other than 408 and 429 is the client's doing; 5xx is
    the instance's. Envoy answers 503 for an instance that it cannot reach or that breaks off before its response.
    """
    if status is None:
        return Ending.ABORTED
    if 200 <= status < 400:
        return Ending.FINISHED
    if 400 <= status < 500 and status not in _OVERLOAD_STATUSES:
        return Ending.REJECTED
    return Ending.FAILED if 500 <= status < 600 else Ending.ABORTED
