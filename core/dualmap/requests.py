"""The values that a pool's router receives and returns.

``PoolRouter`` (dualmap.router) answers a Request with a Decision, a Rejection, or Queued. For a queued request, a later
event returns the Decision or Rejection. The drivers (the ext_proc server and the simulator) report each request's
progress to the router. The router returns values for metrics and logs.

The values that every request creates are named tuples. A named tuple is immutable and takes a quarter of the time of a
frozen dataclass.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Generic, NamedTuple, TypeVar

from dualmap.engines.profile import NO_PROFILE, EngineProfile
from dualmap.engines.prompt_tokens import PromptTokens
from dualmap.engines.source import SourceState
from dualmap.kv_store.view import NO_MATCH, StoreMatch
from dualmap.prompts.blocks import BlockChain
from dualmap.receipt import Receipt


class Request(NamedTuple):
    """A request for a pool.

    ``id`` is unique among all requests that have not ended. ``arrived_s`` is the arrival time on the same clock as
    ``now``. ``subset`` contains the ``ip:port`` or ``ip`` strings that the gateway allows. If ``subset`` is None, all
    endpoints are allowed; if it is empty, no endpoint is allowed. ``streamed`` is true if the response is streamed, so
    that the router observes the first token. ``session`` is the session's key (dualmap.keys.sessions), None if the
    client sent no session.
    ``client`` identifies the client among those of the pool; 0 if clients are not distinguished. ``client_is_salt`` is
    true if no header names the client, only the body's salt or nothing. ``comparable`` is false if the engine may
    report other cached tokens for this request than it caches (``dualmap.prompts.cached_counts``). ``tokens`` are the
    prompt's token ids as its engine computes them, None if they are not known; blocks that engines report are found
    by them. The engine runs the request as ``sequences`` requests, one for each answer to each prompt.
    ``adapter`` is the LoRA adapter that the request names as its model; empty for the base model. ``model`` is the name
    that the request contains: the pool's, an alias or an adapter; empty if it is not known. Requests of higher
    ``priority`` leave the queue first (``dualmap.pools.pool.Objectives``). The request's member computes at most
    ``prefills_up_to`` uncached tokens of the prompt itself; a member of the prefill pool computes more of them. None if
    the member always computes its prompts. ``stored`` is what the pool's KV store holds of the prompt.
    """

    id: str
    chain: BlockChain
    arrived_s: float
    subset: frozenset[str] | None = None
    streamed: bool = True
    session: int | None = None
    client: int = 0
    client_is_salt: bool = False
    comparable: bool = True
    tokens: PromptTokens | None = None
    sequences: int = 1
    adapter: str = ""
    model: str = ""
    priority: int = 0
    stored: StoreMatch = NO_MATCH
    prefills_up_to: int | None = None

    def is_prefilled_elsewhere(self, new_tokens: int) -> bool:
        """Return whether a member of the prefill pool computes ``new_tokens`` uncached tokens of this request."""
        return self.prefills_up_to is not None and new_tokens > self.prefills_up_to


class Decision(NamedTuple):
    """The destination of a request: ``endpoints`` (``ip:port``) with the choice first; Envoy tries them in order.

    ``prefillers`` are the endpoints of the prefill pool that may compute the prompt, the choice first. It is empty if
    the destination computes the prompt.
    """

    request_id: str
    endpoints: tuple[str, ...]
    receipt: Receipt
    prefillers: tuple[str, ...] = ()

    @property
    def destination(self) -> str:
        """The value of x-gateway-destination-endpoint (GAIE proposal 004): ``ip:port[,ip:port]``."""
        return ",".join(self.endpoints)


class Reason(StrEnum):
    """The reason for a rejection."""

    NO_ENDPOINT = "no_endpoint"
    QUEUE_FULL = "queue_full"
    WAITED_TOO_LONG = "waited_too_long"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """A rejected request; ``retry_after_s`` is the recommended time before a retry, None if unknown.

    ``limited`` is true if the queue was full and other clients had queued requests.
    """

    request_id: str
    reason: Reason
    retry_after_s: float | None = None
    limited: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Queued:
    """A request that is queued in the router.

    A later event returns the request's outcome, unless the client aborts the request.
    """

    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request that another router decides (``dualmap.shared_router``).

    A later event returns the request's outcome, unless the client aborts the request. If the other router queues the
    request, an earlier event returns ``Queued``.
    """

    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SentRequest:
    """A request in flight that another router sent to ``endpoint`` (``ip:port``) at ``sent_s``.

    ``matched_tokens`` and ``predicted_ttft_s`` are as in the request's receipt. ``prefilled`` is true after the
    request's first token.
    """

    request: Request
    endpoint: str
    sent_s: float
    matched_tokens: int
    predicted_ttft_s: float
    prefilled: bool


Outcome = Decision | Rejection | Queued
"""What became of a request. ``Queued`` reaches a driver after the request's event only from another router."""
AnswerT = TypeVar("AnswerT", covariant=True)


class Effects(NamedTuple, Generic[AnswerT]):
    """The effects of one router event.

    ``answer`` is the answer to the event itself. ``outcomes`` are the decisions and rejections of queued requests that
    the event released or rejected, in this order. The class is a named tuple because every event creates an instance. A
    named tuple is immutable and takes half the time of a frozen dataclass.
    """

    answer: AnswerT
    outcomes: tuple[Outcome, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts that the engine reported; None for a count that is not reported."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None


class FirstToken(NamedTuple):
    """The first token of a request, with the measured TTFT and the prediction at the time of the decision."""

    member: str
    ttft_s: float
    predicted_ttft_s: float
    within_slo: bool

    @classmethod
    def measured(
        cls, now: float, *, member: str, arrived_s: float, predicted_ttft_s: float, slo_ttft_s: float
    ) -> "FirstToken":
        """Return the first token that arrived now."""
        ttft_s = now - arrived_s
        return cls(member=member, ttft_s=ttft_s, predicted_ttft_s=predicted_ttft_s, within_slo=ttft_s <= slo_ttft_s)


class Completion(NamedTuple):
    """The end of a request. ``measured_cached_tokens`` is None if the engine reported no usage.

    ``comparable`` is false if the measured tokens do not say what the engine caches (``Request``).
    """

    request_id: str
    member: str
    predicted_cached_tokens: int
    measured_cached_tokens: int | None
    comparable: bool = True

    @property
    def predicted_hit(self) -> bool:
        """Whether the router expected at least one cached block, and the engine reported comparable cached tokens."""
        return self.comparable and self.measured_cached_tokens is not None and self.predicted_cached_tokens > 0

    @property
    def stale_hit(self) -> bool:
        """Whether a hit was predicted, and the engine reported no cached tokens."""
        return self.predicted_hit and self.measured_cached_tokens == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EventsStatus:
    """The KV events of one member over all its ranks, as in ``SourceStatus``.

    ``state`` is the worst state of a rank. ``blocks`` is the number of blocks that the member is known to hold.
    """

    state: SourceState = SourceState.OFF
    sequence: int | None = None
    blocks: int = 0
    gaps: int = 0
    resyncs: int = 0
    reason: str = ""


NO_EVENTS: Final = EventsStatus()


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointStatus:
    """One member in this router: the load from this router's requests, and the member's learnt speed.

    ``held`` is the number of queued requests, with ``held_prefill_tokens`` to compute. ``pending_prefill_tokens``
    counts requests in flight only. ``prefill_tokens_per_second`` is the speed for this router's requests;
    ``solo_tokens_per_second`` is the speed without other routers' prefills. A ``suspended`` member failed several
    consecutive requests and receives no new requests for some seconds. ``engine`` is what the member's engine says,
    and ``events`` is the state of its KV events. ``leave_at_s`` is the time at which the member must stop, in seconds
    since the epoch; None for a member without notice.
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
    engine: EngineProfile = NO_PROFILE
    events: EventsStatus = NO_EVENTS
    leave_at_s: float | None = None


class ShadowStatus(NamedTuple):
    """What a policy chose or would have chosen for a sample of a pool's requests, as totals (``dualmap.shadows``).

    The policy ``agreed`` with the pool's own choice of member for some requests, and ``differed`` for the others. The
    predictions are for the policy's choices: the sums of the TTFTs and of the cached tokens.
    """

    policy: str
    agreed: int = 0
    differed: int = 0
    predicted_ttft_s: float = 0.0
    predicted_cached_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSnapshot:
    """A snapshot of a pool's state in this router.

    ``held`` is the number of queued requests. ``unplaced_prefill_tokens`` counts the prompt tokens of requests that
    wait because the pool has no member. ``sessions`` is the number of session bindings. ``peers`` is the number of
    other replicas with a recent report. ``owner`` is the name of the router that decides for the pool; empty for a
    router that decides alone (``dualmap.shared_router``). ``shadows`` compares policies; empty without shadow policies.
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
    owner: str = ""
    shadows: tuple[ShadowStatus, ...] = ()
