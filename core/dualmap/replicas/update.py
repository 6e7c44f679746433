"""What the router replicas of a pool send each other, as values.

``PoolRouter.take_update`` returns what happened since the last call, and ``on_update`` takes another replica's. The
driver
transports it (Redis streams in production, a delayed list in the simulator). It may arrive late, twice or not at all.
Times are ages, since replicas share no clock.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class HotnessCounts:
    """The requests that one replica counted since its last update: in all, and per node of its hotness tree.

    ``split`` are the nodes that are split, sent when they change and once per bucket. A node whose share lies between
    the thresholds is split because of its past, which a replica that started later has not seen.
    """

    requests: int
    nodes: Mapping[int, int]
    split: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedLoad:
    """The load that one replica puts on a member.

    ``pending_prefill_tokens`` counts requests in flight and queued requests. ``backlog_s`` is how long the former
    should keep the member busy, ``held_s`` how long the latter.
    """

    pending_prefill_tokens: int = 0
    backlog_s: float = 0.0
    held_s: float = 0.0
    in_flight: int = 0
    active_kv_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A prompt that was sent to ``endpoint`` (``ip:port``), which will cache its blocks.

    ``hashes`` are the prompt's full blocks from block 0 on, as in ``BlockChain.cacheable``.
    """

    endpoint: str
    hashes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedBinding:
    """The member with a session's KV: ``host``, for a context of ``tokens``; see ``dualmap.keys.sessions``.

    ``version`` counts the session's moves. Of two bindings the one with the higher version is valid, and of two with
    the same version the one that the store took first.
    """

    session: int
    host: str
    tokens: int
    version: int
    moved_ago_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaUpdate:
    """What one replica sends the others about a pool.

    ``loads`` is complete each time, by member id: this replica puts no load on a member that is left out. None means
    that loads are not included. The rest is new since the last ReplicaUpdate. ``wanted`` are sessions that this
    replica met without knowing their binding.
    """

    hotness: HotnessCounts
    loads: Mapping[str, SharedLoad] | None = None
    placements: tuple[Placement, ...] = ()
    bindings: tuple[SharedBinding, ...] = ()
    wanted: tuple[int, ...] = ()
