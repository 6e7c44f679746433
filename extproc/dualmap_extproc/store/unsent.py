"""Keeps one pool's updates until the store has accepted them. All parts are bounded; the oldest are dropped first.

Usually these are the updates of a tenth of a second. While the store is unreachable, they are the last loads, recent
traffic, and the newest placements and bindings. Loads are complete each time and by far the largest part, so they are
sent less often than the rest.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from math import inf
from typing import Final, TypeVar

from dualmap.replicas.update import HotnessCounts, Placement, ReplicaUpdate, SharedBinding, SharedLoad
from dualmap_extproc.store.codec import NODES_MAX

HOTNESS_S: Final = 10.0
"""Older counts are dropped: receivers would count them as present traffic."""
PLACEMENT_HASHES_MAX: Final = 8192
"""The most block hashes per entry (64 KiB): ten million prompt tokens per second, at 128 per block."""
BINDINGS_MAX: Final = 1024
LOADS_INTERVAL_S: Final = 0.25
"""The interval at which changing loads are sent; a shorter one gained nothing (bench/results/replicas.md)."""
HEARTBEAT_S: Final = 1.0
"""The interval at which unchanged loads are sent; other routers drop one that is silent for 3 s
(dualmap.replicas.peers)."""

_Value = TypeVar("_Value")


class Unsent:
    """Collects updates of one pool until a store has accepted them. Every ``now`` is in seconds of one clock."""

    def __init__(self) -> None:
        self._dropped = 0
        self._hotness: deque[tuple[float, HotnessCounts]] = deque()
        self._placements: deque[Placement] = deque()
        self._placed_hashes = 0
        self._loads: dict[str, SharedLoad] = {}
        # By session, with the time they were added: claims to be sent, and won bindings to be sent.
        self._claims: dict[int, tuple[float, SharedBinding]] = {}
        self._held: dict[int, tuple[float, SharedBinding]] = {}
        self._wanted: dict[int, None] = {}
        self._told_loads_s: float | None = None
        self._told_loads: Mapping[str, SharedLoad] = {}

    @property
    def wanted(self) -> tuple[int, ...]:
        """The sessions whose bindings the router looks up."""
        return tuple(self._wanted)

    def take_dropped(self) -> int:
        """Return the number of parts dropped since the last call."""
        dropped, self._dropped = self._dropped, 0
        return dropped

    def add(self, now: float, update: ReplicaUpdate) -> None:
        """Add an update of this router."""
        self._loads = dict(update.loads or {})
        if update.hotness.requests or update.hotness.nodes or update.hotness.split:
            self._hotness.append((now, update.hotness))
        while self._hotness and self._hotness[0][0] < now - HOTNESS_S:
            self._hotness.popleft()
            self._dropped += 1
        self._placements.extend(update.placements)
        self._placed_hashes += sum(len(placement.hashes) for placement in update.placements)
        while self._placed_hashes > PLACEMENT_HASHES_MAX and len(self._placements) > 1:
            self._placed_hashes -= len(self._placements.popleft().hashes)
            self._dropped += 1
        for binding in update.bindings:
            self._claims.pop(binding.session, None)
            self._claims[binding.session] = now, binding
        self._wanted |= dict.fromkeys(update.wanted)
        self._dropped += _bound(self._claims) + _bound(self._wanted)

    def claims(self, now: float) -> tuple[SharedBinding, ...]:
        """Return the bindings that are to be claimed."""
        return _as_of(now, self._claims)

    def answered(self) -> None:
        """Clear the wanted sessions, which the store has answered."""
        self._wanted.clear()

    def settled(self, now: float, holding: tuple[SharedBinding, ...]) -> tuple[SharedBinding, ...]:
        """Apply the store's answer to the claims; return the bindings that won against claims made here."""
        claims, self._claims = self._claims, {}
        lost: list[SharedBinding] = []
        for held in holding:
            _, claim = claims[held.session]
            if (held.host, held.version) == (claim.host, claim.version):
                self._held.pop(held.session, None)
                self._held[held.session] = now, held
            else:
                lost.append(held)
        self._dropped += _bound(self._held)
        return tuple(lost)

    def loads(self, now: float) -> Mapping[str, SharedLoad] | None:
        """Return the loads if they are due: HEARTBEAT_S after they were sent, LOADS_INTERVAL_S if they changed."""
        since_s = inf if self._told_loads_s is None else now - self._told_loads_s
        interval_s = HEARTBEAT_S if self._loads == self._told_loads else LOADS_INTERVAL_S
        return self._loads if since_s >= interval_s else None

    def update(self, now: float) -> ReplicaUpdate | None:
        """Return all unsent parts without the loads, with won bindings only; None if there are none."""
        if not (self._hotness or self._placements or self._held):
            return None
        nodes: dict[int, int] = {}
        for _, counts in self._hotness:
            for node, requests in counts.nodes.items():
                nodes[node] = nodes.get(node, 0) + requests
        if len(nodes) > NODES_MAX:
            # Rarely requested prefixes do not change decisions.
            nodes = dict(sorted(nodes.items(), key=lambda item: -item[1])[:NODES_MAX])
        requests = sum(counts.requests for _, counts in self._hotness)
        split = dict.fromkeys(node for _, counts in self._hotness for node in counts.split)
        return ReplicaUpdate(
            hotness=HotnessCounts(requests=requests, nodes=nodes, split=tuple(islice(split, NODES_MAX))),
            placements=tuple(self._placements),
            bindings=_as_of(now, self._held),
        )

    def told_loads(self, now: float, loads: Mapping[str, SharedLoad]) -> None:
        """Note that the store has accepted the result of ``loads``."""
        self._told_loads_s, self._told_loads = now, loads

    def sent_update(self) -> None:
        """Clear the parts that ``update`` returned, which the store has accepted."""
        self._hotness.clear()
        self._placements.clear()
        self._placed_hashes = 0
        self._held.clear()


def _bound(table: dict[int, _Value]) -> int:
    """Drop the oldest entries above the bound; return their number."""
    excess = max(0, len(table) - BINDINGS_MAX)
    for session in list(islice(table, excess)):
        del table[session]
    return excess


def _as_of(now: float, bindings: dict[int, tuple[float, SharedBinding]]) -> tuple[SharedBinding, ...]:
    return tuple(
        replace(binding, moved_ago_s=binding.moved_ago_s + now - told_s) for told_s, binding in bindings.values()
    )
