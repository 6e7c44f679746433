"""The values that go into a pool's router and come out of it.

``PoolRouter`` (dualmap.router) answers a Request with a Decision, a Refusal, or Held. The decision or rejection of a
queued request is an outcome of a later event. The drivers (the ext_proc server, the simulator) report to the router how
requests go on, and get values back to count and log.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, NamedTuple, TypeVar

from dualmap.prompts.blocks import BlockChain
from dualmap.receipt import Receipt


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request for a pool.

    ``id`` is unique among live requests; ``arrived_s`` is on the clock of every ``now``; ``subset`` holds the
    ``ip:port`` or bare ``ip`` strings a gateway allows (None: no restriction; empty: nothing is allowed). ``streamed``
    says whether the answer comes token by token, so that the first token will be seen. ``session`` names the session
    it belongs to (dualmap.keys.sessions), None where the client named none.
    """

    id: str
    chain: BlockChain
    arrived_s: float
    subset: frozenset[str] | None = None
    streamed: bool = True
    session: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Where a request goes: ``endpoints`` are ``ip:port`` in the order Envoy shall try them, the choice first."""

    request_id: str
    endpoints: tuple[str, ...]
    receipt: Receipt

    @property
    def destination(self) -> str:
        """The value of x-gateway-destination-endpoint (GAIE proposal 004): ``ip:port[,ip:port]``."""
        return ",".join(self.endpoints)


class Reason(StrEnum):
    """Why a request got no instance."""

    NO_ENDPOINT = "no_endpoint"
    QUEUE_FULL = "queue_full"
    WAITED_TOO_LONG = "waited_too_long"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A request that got no instance; ``retry_after_s`` is when it may fare better, None where nobody knows."""

    request_id: str
    reason: Reason
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A request that is queued in the router: a later event has its outcome, unless the request is aborted first."""

    request_id: str


Outcome = Decision | Refusal
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
    """Token counts as the engine reported them; None where it did not say."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstToken:
    """A request's first token was seen. ``predicted_ttft_s`` is what the decision expected, ``ttft_s`` what it took."""

    member: str
    ttft_s: float
    predicted_ttft_s: float
    within_slo: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A request ended. Cached tokens are None unless the engine reported usage for it."""

    request_id: str
    member: str
    predicted_cached_tokens: int
    measured_cached_tokens: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointStatus:
    """One member as this router knows it: its own share of the load in tokens and requests, speed as learnt.

    ``held`` requests with ``held_prefill_tokens`` to compute wait in the router for this member;
    ``pending_prefill_tokens`` are of those handed over. ``prefill_tokens_per_second`` is what a request may count on,
    ``solo_tokens_per_second`` what the instance can do where no other router's prefills come between. A ``suspended``
    member failed several times in a row and is left alone for a moment.
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
class PoolStatus:
    """A pool as this router knows it, taken at one moment.

    ``held`` counts every request that waits in the router, those included that wait for any first member, whose prompts
    have ``homeless_prefill_tokens``;
    ``sessions`` the session bindings it remembers, ``peers`` the other routers it has heard of lately.
    """

    pool: str
    ring_version: int
    held: int
    homeless_prefill_tokens: int = 0
    sessions: int
    peers: int
    endpoints: tuple[EndpointStatus, ...]
    hotness_nodes: int
    split_prefixes: int
