"""How a request ended according to its HTTP status: one rule for ``response`` and the access log.

``picker`` updates its accounts by it, and ``metrics`` counts requests by it.
"""

from enum import Enum
from typing import Final

# Statuses below 500 that report a slow or saturated member, not a faulty request.
_OVERLOAD_STATUSES: Final = (408, 429)


class Ending(Enum):
    """How a dispatched request ended."""

    FINISHED = "finished"
    """The engine served the request, and the response is complete."""
    REJECTED = "rejected"
    """The engine rejected the request as faulty; nothing was prefilled."""
    ABORTED = "aborted"
    """The client cancelled, the response broke off without a fault of the member, or the member was saturated."""
    FAILED = "failed"
    """The member failed: it answered 5xx, refused the connection, or broke off."""


def ending_of(status: int | None) -> Ending:
    """Return how a request ended by the HTTP status of its response; None stands for a response without a status.

    2xx and 3xx count as finished, 4xx as rejected except 408 and 429, and 5xx as failed. Envoy itself answers 503 for a
    member that it cannot reach, or that breaks off before its response.
    """
    if status is None:
        return Ending.ABORTED
    if 200 <= status < 400:
        return Ending.FINISHED
    if 400 <= status < 500 and status not in _OVERLOAD_STATUSES:
        return Ending.REJECTED
    return Ending.FAILED if 500 <= status < 600 else Ending.ABORTED
