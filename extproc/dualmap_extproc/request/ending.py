"""How a request ended, by its HTTP status and by Envoy's access log: one rule for ``stream`` and the access log.

``picker`` closes a request's account by it; metrics count each ending by its name.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Final

from dualmap.requests import Usage

# Statuses below 500 that mean that the engine is slow or full, not that the request is wrong.
_OVERLOAD_STATUSES: Final = (408, 429)

# Envoy's flags of a response that did not reach its end (envoy.data.accesslog.v3.ResponseFlags, by field name). The
# other flags (rate limited, no route, ...) come with an error status of their own. The member did not cause these:
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
# The member caused these: it refused the connection, broke it off, or did not answer in time.
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
    """How a request ended that was sent to a member."""

    FINISHED = "finished"
    """The engine answered, and the response is complete."""
    REJECTED = "rejected"
    """The engine answered that the request is wrong; it prefilled nothing."""
    ABORTED = "aborted"
    """The client cancelled it, it broke off through no fault of the member, or the member was full."""
    FAILED = "failed"
    """The member failed: it answered 5xx, refused the connection, or broke off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessLogEntry:
    """How one request ended, as Envoy saw it; None where Envoy did not report it.

    ``request_id`` is the one the router gave at the pick. ``served_endpoint`` (``ip:port``) is the member Envoy spoke
    to last. ``flags`` are field names of ResponseFlags, in its order.
    """

    request_id: str
    status: int | None = None
    flags: tuple[str, ...] = ()
    served_endpoint: str | None = None
    usage: Usage | None = None

    @property
    def ending(self) -> Ending:
        """The ending by the flags, or by the status where the response did not break off.

        Where both the client and the member broke off, the client left first.
        """
        if BROKEN_FLAGS.intersection(self.flags):
            return Ending.ABORTED
        return Ending.FAILED if FAILED_FLAGS.intersection(self.flags) else ending_of(self.status)


def ending_of(status: int | None) -> Ending:
    """Return the ending by a response's HTTP status; None stands for a response without one.

    2xx and 3xx finish a request. 4xx other than 408 and 429 rejects it; 5xx is the member's failure. Envoy answers 503
    for a member that it cannot reach or that breaks off before its response.
    """
    if status is None:
        return Ending.ABORTED
    if 200 <= status < 400:
        return Ending.FINISHED
    if 400 <= status < 500 and status not in _OVERLOAD_STATUSES:
        return Ending.REJECTED
    return Ending.FAILED if 500 <= status < 600 else Ending.ABORTED
