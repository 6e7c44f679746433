"""The values that go into a pool's router and come out of it.

``PoolRouter`` (dualmap.router) answers a Request with a Decision, a Rejection, or Queued. A later event returns the
outcome of a queued request: its Decision or Rejection. The drivers (the ext_proc server, the simulator) report each
request's progress to the router, and receive values to count and log.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, NamedTuple, TypeVar

from dualmap.prompts.blocks import BlockChain
from dualmap.receipt import Receipt


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request for a pool.

    ``id`` is unique among requests that have not ended. ``arrived_s`` is on the clock of every ``now``. ``subset``
    holds the ``ip:port`` or bare ``ip`` strings that the gateway allows (None: no restriction; empty: none is allowed).
    ``streamed`` is true if the answer comes token by token, so that the router sees the first token. ``session`` is the
    key of its session (dualmap.keys.sessions), None if the client named none. ``client`` identifies the client among
    those of the pool; 0 if clients are not told apart.
    """

    id: str
    chain: BlockChain
    arrived_s: float
    subset: frozenset[str] | None = None
    streamed: bool = True
    session: int | None = None
    client: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The destination of a request: ``endpoints`` are ``ip:port`` in Envoy's order of attempts, the choice first."""

    request_id: str
    endpoints: tuple[str, ...]
    receipt: Receipt

    @property
    def destination(self) -> str:
        """The value of x-gateway-destination-endpoint (GAIE proposal 004): ``ip:port[,ip:port]``."""
        return ",".join(self.endpoints)


class Reason(StrEnum):
    """Why a request is rejected."""

    NO_ENDPOINT = "no_endpoint"
    QUEUE_FULL = "queue_full"
    WAITED_TOO_LONG = "waited_too_long"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """A rejected request; ``retry_after_s`` is when a new try has better chances, None if that is unknown.

    ``limited`` is true if the queue was full and the request's client had its share of it, since others wait, too.
    """

    request_id: str
    reason: Reason
    retry_after_s: float | None = None
    limited: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Queued:
    """A request that is queued in the router: a later event has its outcome, unless the request is aborted first."""

    request_id: str


Outcome = Decision | Rejection
AnswerT = TypeVar("AnswerT", covariant=True)


class Effects(NamedTuple, Generic[AnswerT]):
    """What one event of a router did.

    ``answer`` belongs to the event itself. ``outcomes`` are, in order, the decisions and rejections of queued requests
    that the event released or gave up. (Named tuples are as unchangeable as frozen dataclasses and made in half the
    time; every event makes one.)
    """

    answer: AnswerT
    outcomes: tuple[Outcome, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts as the engine reported them; None for those that it did not report."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstToken:
    """The first token of a request: ``predicted_ttft_s`` was expected at the decision, ``ttft_s`` was measured."""

    member: str
    ttft_s: float
    predicted_ttft_s: float
    within_slo: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The end of a request. Measured cached tokens are None unless the engine reported its usage."""

    request_id: str
    member: str
    predicted_cached_tokens: int
    measured_cached_tokens: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointStatus:
    """One member as this router knows it: the load that this router put on it, and its learnt speed.

    ``held`` requests with ``held_prefill_tokens`` to compute are queued for this member; ``pending_prefill_tokens``
    belong to requests in flight. ``prefill_tokens_per_second`` is what a request can expect, ``solo_tokens_per_second``
    what the member can do without other routers' prefills. A ``suspended`` member failed several requests in a row and
    gets no new ones for a moment.
    """

    id: str
    endpoint: str
    state: str
    weight: int
    in_flight: int
    held: int
    pending_prefill_tokens: int
    held_prefill_tokens: int
    active_kv_tokens: int
    indexed_blocks: int
    prefill_tokens_per_second: float
    solo_tokens_per_second: float
    suspended: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSnapshot:
    """A snapshot of a pool as this router knows it.

    ``held`` counts every queued request. ``unplaced_prefill_tokens`` are the prompts of those that wait for any first
    member. ``sessions`` counts the session bindings, ``peers`` the other routers that reported lately.
    """

    pool: str
    ring_version: int
    held: int
    unplaced_prefill_tokens: int = 0
    sessions: int
    peers: int
    endpoints: tuple[EndpointStatus, ...]
    hotness_nodes: int
    split_prefixes: int
