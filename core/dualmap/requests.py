"""What goes into a pool's router and what comes out of it, as values.

``PoolRouter`` (dualmap.router) consumes a Request and answers with a Decision or a Refusal; the drivers (the ext_proc
server, the simulator) tell it later how the request went and get Observations back to count and log.
"""

from dataclasses import dataclass
from enum import StrEnum

from dualmap.blocks import BlockChain
from dualmap.receipt import Receipt


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request for a pool.

    ``id`` is unique among live requests; ``arrived_s`` is on the clock of every ``now``; ``subset`` holds the
    ``ip:port`` or bare ``ip`` strings a gateway allows (None: no restriction; empty: nothing is allowed). ``streamed``
    says whether the answer comes token by token, so that the first token will be seen.
    """

    id: str
    chain: BlockChain
    arrived_s: float
    subset: frozenset[str] | None = None
    streamed: bool = True


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


class Refusal(StrEnum):
    """Why a request got no instance."""

    NO_ENDPOINT = "no_endpoint"


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

    member: str
    predicted_cached_tokens: int
    measured_cached_tokens: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointStatus:
    """One member as this router knows it: loads in tokens and requests, speed as learnt (tokens per second)."""

    id: str
    endpoint: str
    state: str
    weight: int
    in_flight: int
    pending_prefill_tokens: int
    active_kv_tokens: int
    indexed_blocks: int
    prefill_tokens_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStatus:
    """A pool as this router knows it, taken at one moment."""

    pool: str
    ring_version: int
    endpoints: tuple[EndpointStatus, ...]
    hotness_nodes: int
    split_prefixes: int
