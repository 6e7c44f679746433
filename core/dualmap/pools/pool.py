"""The InferencePool in the router and the operator: frozen values with units in their names.

Only ``dualmap.objects.pool_reader`` creates these values, from a Kubernetes object or a pool file. The defaults are the
schema's defaults (docs/pool.md); the fields correspond to ``spec`` and ``status.ring`` of the v1alpha1 object.
"""

from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import inf
from typing import Final

from dualmap.pools.kv_store import KvStore


class MemberState(StrEnum):
    """The state of a member: Joining (its weight increases), Active, or Draining (no new keys map to it)."""

    JOINING = "Joining"
    ACTIVE = "Active"
    DRAINING = "Draining"


class RingAlgorithm(StrEnum):
    """The algorithm that maps a key to a member on one ring."""

    RENDEZVOUS = "Rendezvous"
    VIRTUAL_NODES = "VirtualNodes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One instance of the pool. Rings identify a member by ``id``, which stays the same after a restart.

    A restart may change address and port. ``incarnation`` identifies the engine's process: it differs after a restart,
    which also empties the cache. ``incarnation`` is empty if the operator did not report it. ``leave_at_s`` is the time
    at which a Draining member must stop, in seconds since the epoch; None for a member without notice.
    """

    id: str
    address: str
    port: int
    state: MemberState = MemberState.ACTIVE
    weight: int = 100
    incarnation: str = ""
    leave_at_s: float | None = None

    @property
    def endpoint(self) -> str:
        """``ip:port`` (``[ip]:port`` for IPv6), the format of the destination header and of Envoy's hosts."""
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"

    @property
    def takes_new_keys(self) -> bool:
        """True if the rings may map keys to this member."""
        return self.state is not MemberState.DRAINING and self.weight > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The model that a pool serves: requests have ``name`` or one of ``aliases`` in their field "model".

    An empty ``name`` stands for any name: the pool serves whatever models its engines serve, and requests with
    different names share no cache keys.
    ``adapters`` are the LoRA adapters that the engines serve. Requests select an adapter in the field "model". Each
    adapter has its own cache keys, because its KV cache differs from the base model's.
    """

    name: str
    aliases: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    _adapters: frozenset[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_adapters", frozenset(self.adapters))

    @property
    def names(self) -> tuple[str, ...]:
        """All values of the field "model" that map to the pool."""
        return (self.name, *self.aliases, *self.adapters)

    def base_of(self, name: str) -> str:
        """Return the model whose KV cache a request for ``name`` uses; an adapter's model is the pool's."""
        return self.name or name

    def adapter_of(self, name: str) -> str:
        """Return the adapter of a request for ``name``; empty for the base model."""
        return name if name in self._adapters else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvEvents:
    """The ports and the topic with which an engine publishes KV cache events, if enabled.

    The data-parallel rank is added to both ports. Ports that an engine reports replace these values.
    """

    enabled: bool = False
    port: int = 5557
    replay_port: int = 5558
    topic: str = ""


class TokenSource(StrEnum):
    """How the router gets the token ids of a prompt; ESTIMATE stands for no ids."""

    ESTIMATE = "Estimate"
    FILES = "Files"
    RENDERER = "Renderer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenizer:
    """The source of token ids: the folder ``path`` for FILES, the server at ``url`` for RENDERER."""

    source: TokenSource = TokenSource.ESTIMATE
    path: str = ""
    url: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Discovery:
    """What the router asks of every member's engine.

    If ``enabled``, the router reads each engine's load all the time, and its other facts every ``interval_s`` seconds.
    ``cache_tokens`` and ``max_model_len`` say whether the engine's fact replaces the value in ``Engine``, which is then
    only the value for engines that do not say it.
    """

    enabled: bool = True
    interval_s: float = 10.0
    cache_tokens: bool = True
    max_model_len: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """The engine on each member. The prefill speed is a prior; the router learns each member's speed.

    ``cache_tokens`` is the amount of KV that a member keeps for reuse. ``kv_tokens`` is the amount of KV that a
    member's requests in flight can use in total; None means that the engine says it, or else unknown and no limit.
    ``max_model_len`` is the number of tokens up to which the router counts a prompt.
    """

    type: str = "vLLM"
    port: int = 8000
    prefill_tokens_per_second: float = 7000.0
    cache_tokens: int = 1_000_000
    kv_tokens: int | None = None
    max_model_len: int = 131_072
    kv_events: KvEvents = KvEvents()
    tokenizer: Tokenizer = Tokenizer()
    discovery: Discovery = Discovery()

    @property
    def checks_names(self) -> bool:
        """Whether engines of this type reject requests for models that they do not list, as vLLM does with 404."""
        return self.type == "vLLM"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """The objective: the share ``attainment`` of all requests gets its first token within ``ttft_s`` seconds."""

    ttft_s: float = 5.0
    attainment: float = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """The settings of both rings: the algorithm, the anchors of a member with full weight, and the seed."""

    algorithm: RingAlgorithm = RingAlgorithm.RENDEZVOUS
    virtual_nodes: int = 128
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """The settings of keys: block length in tokens, key length in blocks, and the hotness window in seconds."""

    block_tokens: int = 128
    initial_blocks: int = 2
    max_blocks: int = 64
    window_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Spill:
    """The settings for the choice of members outside the pair (see dualmap.policies.pair.dualmap)."""

    slo_fraction: float = 0.5
    prefill_weight: float = 3.0
    active_kv_weight: float = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebalance:
    """Hotspot rebalancing; ``decode_stall_s`` is the threshold of decode-bottleneck detection (paper section A.7)."""

    enabled: bool = True
    decode_stall_s: float = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """The settings of the router's queue: the backlog limit, the maximum size and wait, and the order.

    If a member's backlog exceeds ``dispatch_window_s``, the router queues further requests for this member; infinity
    disables the queue. ``max_overtaken`` is the maximum number of later requests that overtake a request; 0 means first
    come, first served. ``hold_when_empty`` queues requests while the pool has no member.
    """

    dispatch_window_s: float = 0.25
    max_held: int = 1000
    max_wait_s: float = 30.0
    order: str = "Fcfs"
    max_overtaken: int = 8
    hold_when_empty: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionMigration:
    """The settings for moves of a session to another host (EAR): the load ratio and the time between moves.

    With ``pull``, the engines can pull the KV of prompts from each other without a store.
    """

    enabled: bool = False
    hot_ratio: float = 0.2
    cooldown_s: float = 30.0
    pull: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """The settings of sessions: the header with the session id, the lifetime of a binding, and migration."""

    header: str = "x-session-id"
    ttl_s: float = 1800.0
    migration: SessionMigration = SessionMigration()


@dataclass(frozen=True, slots=True, kw_only=True)
class Fairness:
    """How the clients of a pool are told apart: by the request header ``header``; empty for none."""

    header: str = ""


BODY_BYTES: Final = 16 * 1024 * 1024
"""The largest request body that a pool accepts by default."""


class ReceiptFields(StrEnum):
    """The fields of x-dualmap-decision. ``CHOSEN`` leaves out what other clients' prompts influence."""

    FULL = "Full"
    CHOSEN = "Chosen"


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """All settings that decide the member of a request.

    ``receipt_header`` switches x-dualmap-decision on. ``max_body_bytes`` is the largest request body. With
    ``continues``, the sidecar of the member learns which member can continue its stream. ``shadow`` are the policies
    that are compared with ``policy`` for the share ``shadow_sample`` of the requests; they decide nothing.
    """

    policy: str = "dualmap"
    shadow: tuple[str, ...] = ()
    shadow_sample: float = 0.1
    receipt_header: bool = True
    receipt_fields: ReceiptFields = ReceiptFields.FULL
    max_body_bytes: int = BODY_BYTES
    fairness: Fairness = Fairness()
    ring: Ring = Ring()
    prefix: Prefix = Prefix()
    spill: Spill = Spill()
    rebalance: Rebalance = Rebalance()
    queue: Queue = Queue()
    session: Session = Session()
    continues: bool = False


@dataclass(frozen=True, slots=True)
class Objectives:
    """The priority of requests by the objective that they name: pairs of an objective's name and its priority.

    Requests of higher priority leave the queue first. If the queue is full, those of the lowest priority are rejected.
    """

    priorities: tuple[tuple[str, int], ...] = ()
    _of: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_of", dict(self.priorities))

    def priority_of(self, objective: str) -> int:
        """Return the priority of requests that name an objective; 0 for an unknown one and for none."""
        return self._of.get(objective, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """One InferencePool: its model, engine, objective, routing settings, and members at ``ring_version``.

    ``prefill_pool`` is the name of the pool in the same namespace whose members prefill for this pool; empty for none.
    A member with fewer than ``prefill_min_tokens`` uncached tokens of a prompt computes them itself.
    ``foreign_names`` are the model names that are reserved for other namespaces, which this pool does not serve. They
    change with every pool of the cluster, so a comparison of pools ignores them.
    """

    namespace: str
    name: str
    model: Model
    engine: Engine = field(default_factory=Engine)
    slo: Slo = field(default_factory=Slo)
    routing: Routing = field(default_factory=Routing)
    members: tuple[Member, ...] = ()
    ring_version: int = 0
    objectives: Objectives = Objectives()
    kv_store: KvStore = field(default_factory=KvStore)
    prefill_pool: str = ""
    prefill_min_tokens: int = 512
    foreign_names: frozenset[str] = field(default=frozenset(), compare=False)

    @property
    def served_names(self) -> tuple[str, ...]:
        """The values of the field "model" in requests that may go to this pool."""
        foreign = frozenset(self.foreign_names)
        return tuple(name for name in self.model.names if name not in foreign)

    @property
    def id(self) -> str:
        """``namespace/name``, the pool's id in metrics, logs and URLs."""
        return f"{self.namespace}/{self.name}"

    @property
    def fetches_kv(self) -> bool:
        """Whether the members can fetch the KV of a prompt: from the pool's store, or from each other."""
        return self.kv_store.is_used or self.routing.session.migration.pull

    def never_queueing(self) -> "Pool":
        """Return this pool with a queue configuration that dispatches every request at once."""
        queue = replace(self.routing.queue, dispatch_window_s=inf, hold_when_empty=False)
        return replace(self, routing=replace(self.routing, queue=queue))
