"""The InferencePool as the router and the operator see it: frozen values with units in their names.

``dualmap.objects.pool_reader`` makes these from a Kubernetes object or a pool file; nothing else does. The defaults
here are the schema's defaults (docs/pool.md); the fields mirror ``spec`` and ``status.ring`` of the v1alpha1 object.
"""

from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import inf


class MemberState(StrEnum):
    """The state of a member: Joining (its weight ramps up), Active, Draining (it takes no new keys), then removed."""

    JOINING = "Joining"
    ACTIVE = "Active"
    DRAINING = "Draining"


class RingAlgorithm(StrEnum):
    """How a key finds its member on one ring."""

    RENDEZVOUS = "Rendezvous"
    VIRTUAL_NODES = "VirtualNodes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One instance of the pool. ``id`` is its identity on the rings and survives restarts; address and port do not.

    ``incarnation`` identifies the process behind it: after a restart it differs, and the cache is empty although the
    address is the same. Empty if the operator did not report it.
    """

    id: str
    address: str
    port: int
    state: MemberState = MemberState.ACTIVE
    weight: int = 100
    incarnation: str = ""

    @property
    def endpoint(self) -> str:
        """``ip:port`` (``[ip]:port`` for IPv6), as the destination header and Envoy's hosts spell it."""
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"

    @property
    def takes_new_keys(self) -> bool:
        """Whether the rings may map keys to this member."""
        return self.state is not MemberState.DRAINING and self.weight > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The model a pool serves: requests have ``name`` or one of ``aliases`` in their field "model".

    ``adapters`` are the LoRA adapters that its engines serve. Requests name an adapter in "model". Each adapter has
    cache keys of its own, since its KV cache differs from the base model's.
    """

    name: str
    aliases: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Every value of "model" that leads to the pool."""
        return (self.name, *self.aliases, *self.adapters)

    def adapter_of(self, name: str) -> str:
        """Return the adapter that a request for ``name`` uses; empty for the base model."""
        return name if name in self.adapters else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvEvents:
    """Where an engine publishes its KV cache events, if it does (ports)."""

    enabled: bool = False
    port: int = 5557
    replay_port: int = 5558


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """What runs on each member. The speed is a prior, and is learnt per member afterwards.

    ``cache_tokens`` is how much KV a member keeps for reuse. ``kv_tokens`` is how much KV its requests in flight can
    use together; None if unknown, and then it limits nothing. ``max_model_len`` is the longest prompt in tokens that
    the router accounts for; the engine rejects a longer one.
    """

    type: str = "vLLM"
    port: int = 8000
    prefill_tokens_per_second: float = 7000.0
    cache_tokens: int = 1_000_000
    kv_tokens: int | None = None
    max_model_len: int = 131_072
    kv_events: KvEvents = KvEvents()


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """The objective: ``attainment`` of the requests get their first token within ``ttft_s`` seconds."""

    ttft_s: float = 5.0
    attainment: float = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """How keys map to members: the algorithm, anchors per member of full weight, and the seed of both rings."""

    algorithm: RingAlgorithm = RingAlgorithm.RENDEZVOUS
    virtual_nodes: int = 128
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """How prompts become keys: block length in tokens, key length in blocks, and the window of hotness in seconds."""

    block_tokens: int = 128
    initial_blocks: int = 2
    max_blocks: int = 64
    window_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Spill:
    """When and where the ``dualmap`` policy leaves the pair (see dualmap.policies.pair.dualmap)."""

    slo_fraction: float = 0.5
    prefill_weight: float = 3.0
    active_kv_weight: float = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebalance:
    """Hotspot rebalancing; ``decode_stall_s`` is T of the paper's decode-bottleneck detection (section A.7)."""

    enabled: bool = True
    decode_stall_s: float = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """The queue of the router: beyond which backlog requests are queued, how many, how long, and in which order.

    ``dispatch_window_s`` is the backlog of a member in seconds beyond which further requests for it are queued;
    infinity never queues any. ``max_overtaken`` is how often a request may be overtaken by later ones; 0 is first come,
    first served. ``hold_when_empty`` queues requests while the pool has no member.
    """

    dispatch_window_s: float = 0.25
    max_held: int = 1000
    max_wait_s: float = 30.0
    order: str = "Fcfs"
    max_overtaken: int = 8
    hold_when_empty: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionMigration:
    """When a session may leave its host (EAR): the load ratio that triggers it and the pause between moves."""

    enabled: bool = False
    hot_ratio: float = 0.2
    cooldown_s: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """How sessions are recognised and how long a binding lives."""

    header: str = "x-session-id"
    ttl_s: float = 1800.0
    migration: SessionMigration = SessionMigration()


@dataclass(frozen=True, slots=True, kw_only=True)
class Fairness:
    """How the clients of a pool are told apart: by the request header ``header``; empty for none."""

    header: str = ""


class ReceiptFields(StrEnum):
    """The fields of x-dualmap-decision. ``CHOSEN`` leaves out what other clients' prompts influence."""

    FULL = "Full"
    CHOSEN = "Chosen"


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """All settings that decide the member of a request.

    ``receipt_header`` switches x-dualmap-decision on. ``max_body_bytes`` is the largest request body.
    """

    policy: str = "dualmap"
    receipt_header: bool = True
    receipt_fields: ReceiptFields = ReceiptFields.FULL
    max_body_bytes: int = 16 * 1024 * 1024
    fairness: Fairness = Fairness()
    ring: Ring = Ring()
    prefix: Prefix = Prefix()
    spill: Spill = Spill()
    rebalance: Rebalance = Rebalance()
    queue: Queue = Queue()
    session: Session = Session()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """One InferencePool: what it serves, how it routes, and its members at ``ring_version``."""

    namespace: str
    name: str
    model: Model
    engine: Engine = field(default_factory=Engine)
    slo: Slo = field(default_factory=Slo)
    routing: Routing = field(default_factory=Routing)
    members: tuple[Member, ...] = ()
    ring_version: int = 0

    @property
    def id(self) -> str:
        """``namespace/name``: how metrics, logs and URLs name the pool."""
        return f"{self.namespace}/{self.name}"

    def never_queueing(self) -> "Pool":
        """Return this pool with a queue that dispatches every request at once, regardless of the backlog."""
        queue = replace(self.routing.queue, dispatch_window_s=inf, hold_when_empty=False)
        return replace(self, routing=replace(self.routing, queue=queue))
