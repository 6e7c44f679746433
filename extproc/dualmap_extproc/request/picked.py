"""The answers to a pick: a destination now, or a queued request whose answer comes later."""

from dataclasses import dataclass, field

from dualmap.requests import Decision


@dataclass(frozen=True, slots=True, kw_only=True)
class Picked:
    """Where a request goes. ``destination`` is ``ip:port[,ip:port]``, ``cluster`` the pool's cluster in Envoy.

    ``request_id`` is empty for a request without a prompt, of which the router keeps no account. ``receipt`` is the
    value of the decision header, None where the response gets none. ``decision`` is None without a prompt.
    """

    destination: str
    cluster: str
    request_id: str = ""
    receipt: str | None = None
    decision: Decision | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerLater:
    """A queued request. Its outcome comes by ``resume``, unless it is aborted first."""

    request_id: str
