"""How a request ended, by its HTTP status or Envoy's access log: one rule for ``stream`` and the access log.

The picker uses the ending to record the end of a request. Metrics count requests by the ending's name.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Final

from dualmap.requests import Usage

# Statuses below 500 for a slow or full engine. Other statuses from 400 to 499 mean that the request is invalid.
_OVERLOAD_STATUSES: Final = (408, 429)

# Envoy's flags for an incomplete response that the member did not cause. The names are fields of
# envoy.data.accesslog.v3.ResponseFlags. Envoy sets its other flags, such as rate limited or no route, together with an
# error status.
BROKEN_FLAGS: Final = frozenset(
    {
        "downstream_connection_termination",
        "downstream_protocol_error",
        "downstream_remote_reset",
        "duration_timeout",
        "local_reset",
        "no_healthy_upstream",
        "overload_manager",
        "stream_idle_timeout",
        "upstream_max_stream_duration_reached",
        "upstream_overflow",
    }
)
# Envoy's flags for a failure of the member: the member refused or closed the connection, or did not answer in time.
FAILED_FLAGS: Final = frozenset(
    {
        "upstream_connection_failure",
        "upstream_connection_termination",
        "upstream_protocol_error",
        "upstream_remote_reset",
        "upstream_request_timeout",
    }
)


class Ending(Enum):
    """How a request that was sent to a member ended."""

    FINISHED = "finished"
    """The engine answered, and the response is complete."""
    REJECTED = "rejected"
    """The engine answered that the request is invalid; the engine prefilled nothing."""
    ABORTED = "aborted"
    """The client cancelled the request, the response broke off without the member's fault, or the member was full."""
    FAILED = "failed"
    """The member failed: the member answered 5xx, or refused or closed the connection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessLogEntry:
    """Envoy's report of the end of one request; fields that Envoy did not report are None.

    ``request_id`` is the id that the router assigned at the pick. ``served_endpoint`` (``ip:port``) is the last member
    that Envoy connected to. ``flags`` are field names of ResponseFlags, in the order of the .proto file. ``sender`` is
    the identity (``wire.peer``) of the Envoy that sent the entry to another router, which forwarded it; None otherwise.
    ``total_s`` is the time from the request's first byte to the response's last byte. ``attempts`` is the number of
    members that Envoy tried.
    """

    request_id: str
    status: int | None = None
    flags: tuple[str, ...] = ()
    served_endpoint: str | None = None
    usage: Usage | None = None
    sender: str | None = None
    total_s: float | None = None
    attempts: int | None = None

    @property
    def is_broken(self) -> bool:
        """Whether the response is incomplete without the member's fault."""
        return not BROKEN_FLAGS.isdisjoint(self.flags)

    @property
    def ending(self) -> Ending:
        """The ending by the flags, or by the status if the response is complete.

        If flags exist for both the client and the member, the client disconnected first.
        """
        if self.is_broken:
            return Ending.ABORTED
        return Ending.FAILED if FAILED_FLAGS.intersection(self.flags) else ending_of(self.status)


def ending_of(status: int | None) -> Ending:
    """Return the ending by a response's HTTP status (None: no status).

    The ending is FINISHED for 2xx and 3xx, and FAILED for 5xx. The ending is ABORTED for 408 and 429, and REJECTED for
    any other 4xx. Envoy answers 503 if it cannot reach the member, or if the member closes the connection before its
    response.
    """
    if status is None:
        return Ending.ABORTED
    if 200 <= status < 400:
        return Ending.FINISHED
    if 400 <= status < 500 and status not in _OVERLOAD_STATUSES:
        return Ending.REJECTED
    return Ending.FAILED if 500 <= status < 600 else Ending.ABORTED
