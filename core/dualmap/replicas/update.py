"""The values that the router replicas of a pool send to other replicas.

``PoolRouter.take_update`` returns the changes since the last call, and ``on_update`` applies another replica's update.
The driver transports the update (Redis streams in production, a delayed list in the simulator). An update may arrive
late, twice or never. Times are ages, because replicas share no clock.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class HotnessCounts:
    """The requests that one replica counted since its last update: the total, and the count per hotness tree node.

    ``split`` contains the nodes that are split. A replica sends ``split`` after changes and once per bucket. Counts
    alone are not sufficient: a node with a share between the two thresholds keeps its earlier state. A replica that
    started later has not observed that state.
    """

    requests: int
    nodes: Mapping[int, int]
    split: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedLoad:
    """The load that one replica puts on a member.

    ``pending_prefill_tokens`` counts requests in flight and queued requests. ``backlog_s`` is the expected prefill time
    of the requests in flight. ``held_s`` is the expected prefill time of the queued requests without the
    deferred ones. ``in_flight`` is the number of sequences in flight: an engine runs each answer to each prompt of a
    request as a request of its own.
    """

    pending_prefill_tokens: int = 0
    backlog_s: float = 0.0
    held_s: float = 0.0
    in_flight: int = 0
    active_kv_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A prompt that was sent to ``endpoint`` (``ip:port``); this member will cache the prompt's blocks.

    ``hashes`` are the hashes of the prompt's full blocks from block 0 on (``BlockChain.cacheable``).
    """

    endpoint: str
    hashes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedBinding:
    """The member (``host``) that has a session's KV of ``tokens`` tokens; see ``dualmap.keys.sessions``.

    ``version`` counts the session's moves. The binding with the higher version is valid. If two versions are equal, the
    binding that the store received first is valid.
    """

    session: int
    host: str
    tokens: int
    version: int
    moved_ago_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaUpdate:
    """The update on one pool that a replica sends to the other replicas.

    ``loads`` is by member id and is complete each time: this replica puts no load on a member that is missing in it. If
    ``loads`` is None, the last loads still apply. All other fields contain only changes since the last ReplicaUpdate.
    ``wanted`` contains sessions of requests for which this replica has no binding.
    """

    hotness: HotnessCounts
    loads: Mapping[str, SharedLoad] | None = None
    placements: tuple[Placement, ...] = ()
    bindings: tuple[SharedBinding, ...] = ()
    wanted: tuple[int, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether the update contains nothing to send."""
        counts = self.hotness
        changes = counts.requests or counts.nodes or counts.split or self.placements or self.bindings or self.wanted
        return self.loads is None and not changes
