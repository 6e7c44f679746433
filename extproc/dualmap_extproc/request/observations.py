"""Observations: typed events about requests, and the fan-out that passes them to subscribers.

``picker`` and the transport report each event once, on the event loop. Metrics, autoscaling demand, the dashboard and
tracing subscribe to the types they need. ``now`` is the event's time in monotonic seconds. ``pool`` is the pool's
``namespace/name``. Loads are not observations: subscribers read loads from the pools' statuses (``Picker.statuses``).

Observations are named tuples, which are immutable and take half the time of frozen dataclasses to create. Every request
creates about five observations.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias, TypeVar

from dualmap.pools.pool import Pool
from dualmap.requests import Completion, Decision, FirstToken, Request
from dualmap_edge.logs import get_logger
from dualmap_extproc.errors import Refused
from dualmap_extproc.request.ending import AccessLogEntry, Ending

_log = get_logger(__name__)


class Arrival(NamedTuple):
    """The time when a request reached the router, and its headers that the picker keeps (``Picker.kept_headers``)."""

    at_s: float
    headers: Mapping[str, str]


class Accepted(NamedTuple):
    """A request with a prompt found its pool. Routed, Rejected or Abandoned follows."""

    now: float
    pool: str
    request: Request
    arrival: Arrival


class Routed(NamedTuple):
    """The router sent a request with a prompt to a member; ``queued_s`` is its time in the queue (None: not queued)."""

    now: float
    pool: str
    decision: Decision
    arrival: Arrival
    queued_s: float | None = None


class RoutedBodiless(NamedTuple):
    """A request without a prompt was sent to any member."""

    now: float
    pool: str


class Rejected(NamedTuple):
    """The router answered a request with an error; ``pool`` is empty if no pool was found.

    ``arrival`` is None for a request without a prompt. ``queued_s`` is as in Routed. ``request_id`` is empty for a
    request that was not accepted.
    """

    now: float
    pool: str
    refused: Refused
    arrival: Arrival | None
    queued_s: float | None = None
    request_id: str = ""


class Enqueued(NamedTuple):
    """A request was queued in the router. Routed, Rejected or Abandoned follows."""

    now: float
    pool: str


class ClientLimited(NamedTuple):
    """A full queue gave no place to a request because the request's client had its share. Rejected follows."""

    now: float
    pool: str


class Abandoned(NamedTuple):
    """The client left before its request was routed or rejected; ``queued_s`` is as in Routed."""

    now: float
    pool: str
    arrival: Arrival
    queued_s: float | None
    request_id: str = ""


class Decided(NamedTuple):
    """The router read a body, picked a member and built the answer in ``seconds``."""

    now: float
    seconds: float


class RemotelyDecided(NamedTuple):
    """A request of a pool that another router owns was decided after ``seconds`` (``dualmap.shared_router``)."""

    pool: str
    result: str
    seconds: float


class MembersDeparted(NamedTuple):
    """The time at which these members had to leave has passed; they get no requests while another member can serve."""

    pool: str
    members: tuple[str, ...]


class OwnerChanged(NamedTuple):
    """Another router than ``before`` owns a pool, as far as this router knows (``dualmap.shared_router``)."""

    pool: str
    before: str
    owner: str


class FirstTokenSeen(NamedTuple):
    """The first chunk of a response's event stream arrived.

    If a member of the prefill pool computed the prompt, the first token is reported for both pools.
    """

    now: float
    pool: str
    first_token: FirstToken
    request_id: str = ""


class Logged(NamedTuple):
    """Envoy's access log reported a request of this router. Ended follows, unless the request has ended before."""

    now: float
    entry: AccessLogEntry


class Ended(NamedTuple):
    """A request that was sent to a member ended."""

    now: float
    pool: str
    ending: Ending
    completion: Completion


class Expired(NamedTuple):
    """A request was removed because no event about the request arrived for the time to live of requests in flight."""

    now: float
    pool: str
    completion: Completion


class Measured(NamedTuple):
    """The engine reported a request's number of cached prompt tokens, at the request's end or later."""

    now: float
    pool: str
    completion: Completion


class ServedElsewhere(NamedTuple):
    """Envoy reported that another member than the picked member served a request."""

    now: float
    pool: str


class PickNotFollowed(NamedTuple):
    """The gateway reported that it sent a request to none of the endpoints that the pick named."""

    now: float
    pool: str


class PoolsChanged(NamedTuple):
    """The picker has new pools, or engines reported facts about them; ``pools`` are all, with these facts."""

    now: float
    pools: tuple[Pool, ...]


class Tokenized(NamedTuple):
    """The router computed a request's token ids, or gave up, in ``seconds``."""

    now: float
    pool: str
    seconds: float


class TokensMismatched(NamedTuple):
    """The engine counted another number of prompt tokens than the router's token ids."""

    now: float
    pool: str


Observation: TypeAlias = (
    Accepted
    | Routed
    | RoutedBodiless
    | Rejected
    | ClientLimited
    | Enqueued
    | Abandoned
    | Decided
    | RemotelyDecided
    | MembersDeparted
    | OwnerChanged
    | FirstTokenSeen
    | Logged
    | Ended
    | Expired
    | Measured
    | ServedElsewhere
    | PickNotFollowed
    | PoolsChanged
    | Tokenized
    | TokensMismatched
)
Report: TypeAlias = Callable[[Observation], None]

_Kind = TypeVar("_Kind", bound=Observation)


class FanOut:
    """The fan-out, which passes each observation to the handlers of its type, in the order of their subscription.

    Handlers must not block. If a handler raises an error, the fan-out logs the handler's first error. The error does
    not affect routing or other handlers.
    """

    def __init__(self) -> None:
        self._handlers: dict[type[Any], tuple[Callable[[Any], None], ...]] = {}
        self._failed: set[Callable[[Any], None]] = set()

    def subscribe(self, kind: type[_Kind], handler: Callable[[_Kind], None]) -> None:
        """Subscribe ``handler`` to observations of the type ``kind``."""
        self._handlers[kind] = (*self._handlers.get(kind, ()), handler)

    def report(self, observation: Observation) -> None:
        """Pass an observation to its handlers; never raises."""
        for handler in self._handlers.get(type(observation), ()):
            try:
                handler(observation)
            except Exception as error:  # noqa: BLE001  # A failing subscriber must not stop routing.
                self._log_once(handler, observation, error)

    def _log_once(self, handler: Callable[[Any], None], observation: Observation, error: Exception) -> None:
        if handler in self._failed:
            return
        self._failed.add(handler)
        line = error.__traceback__
        while line is not None and line.tb_next is not None:
            line = line.tb_next
        # The log contains only the error's type and line, because an error's text may quote a request's headers.
        _log.error(
            "Observation handler failed, further failures are not logged",
            handler=getattr(handler, "__qualname__", repr(type(handler))),
            observation=type(observation).__name__,
            error=type(error).__name__,
            place="" if line is None else f"{line.tb_frame.f_code.co_filename}:{line.tb_lineno}",
        )
