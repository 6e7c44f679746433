"""What the router replicas of a pool tell each other, as values without a clock of their own.

``PoolRouter.take_news`` makes News of what happened since the last call, ``on_news`` takes another replica's. How it
travels is the driver's business (Redis streams in production, a delayed list in the simulator); it may come late, twice
or not at all. Times are ages, since replicas share no clock.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class HotnessCounts:
    """The requests that one replica counted since its last update: in all, and per node of its hotness tree.

    ``split`` are the nodes that are split, sent when they change and once per bucket: a node whose share lies between
    the thresholds is split because of its past, which a replica that started later has not seen.
    """

    requests: int
    nodes: Mapping[int, int]
    split: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedLoad:
    """One replica's own share of a member's load.

    ``pending_prefill_tokens`` counts requests handed over and requests held for the member; ``backlog_s`` is how long
    the former should keep it busy, ``held_s`` the latter.
    """

    pending_prefill_tokens: int = 0
    backlog_s: float = 0.0
    held_s: float = 0.0
    in_flight: int = 0
    active_kv_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A prompt was sent to ``endpoint`` (``ip:port``), which will hold its blocks.

    ``hashes`` are the prompt's full blocks from block 0 on, as in ``BlockChain.cacheable``.
    """

    endpoint: str
    hashes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedBinding:
    """Where a session's KV lies: on member ``host``, for a context of ``tokens``; see ``dualmap.keys.sessions``.

    ``version`` counts the session's moves: of two bindings the one with the higher version holds, and of two with the
    same version the one that the store took first.
    """

    session: int
    host: str
    tokens: int
    version: int
    moved_ago_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """What one replica tells the others about a pool.

    ``loads`` is whole each time, by member id: a member it leaves out has none of this replica's load; None says
    nothing of loads. The rest is what is new since the last News. ``wanted`` are sessions that this replica met
    without knowing their binding.
    """

    hotness: HotnessCounts
    loads: Mapping[str, SharedLoad] | None = None
    placements: tuple[Placement, ...] = ()
    bindings: tuple[SharedBinding, ...] = ()
    wanted: tuple[int, ...] = ()
