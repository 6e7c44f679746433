"""Keeps one pool's updates until the store has accepted them. All collections are bounded and drop their oldest items.

Usually the unsent updates cover a tenth of a second. While the store is unreachable, the unsent updates contain the
last loads, the traffic of the last seconds, and the newest placements and bindings. Loads are always complete and are
most of the bytes, so the router sends loads less often than other updates.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from math import inf
from typing import Final, TypeVar

from dualmap.replicas.update import HotnessCounts, Placement, ReplicaUpdate, SharedBinding, SharedLoad
from dualmap_extproc.store.codec import BINDINGS_MAX, NODES_MAX, PLACEMENT_HASHES_MAX

HOTNESS_S: Final = 10.0
"""The greatest age of counts. Receivers would count older requests as current traffic."""
LOADS_INTERVAL_S: Final = 0.25
"""The shortest interval of messages with loads. Loads are most of the bytes (bench/results/replicas.md)."""
HEARTBEAT_S: Final = 1.0
"""The interval of messages with unchanged loads.

Other routers drop a router that sends no loads for 3 s (dualmap.replicas.peers).
"""

_Value = TypeVar("_Value")


class Unsent:
    """The updates of one pool that a store has not accepted yet. Every ``now`` is in seconds of one clock."""

    def __init__(self) -> None:
        self._dropped = 0
        self._hotness: deque[tuple[float, HotnessCounts]] = deque()
        self._placements: deque[Placement] = deque()
        self._placed_hashes = 0
        self._loads: dict[str, SharedLoad] = {}
        # By session: bindings to claim, and successfully claimed bindings to publish. Each binding has the time when it
        # was added.
        self._claims: dict[int, tuple[float, SharedBinding]] = {}
        self._won: dict[int, tuple[float, SharedBinding]] = {}
        self._wanted: dict[int, None] = {}
        self._sent_loads_s: float | None = None
        self._sent_loads: Mapping[str, SharedLoad] = {}

    @property
    def wanted(self) -> tuple[int, ...]:
        """The sessions for which the router requests bindings."""
        return tuple(self._wanted)

    def take_dropped(self) -> int:
        """Return the number of items dropped since the last call."""
        dropped, self._dropped = self._dropped, 0
        return dropped

    def add(self, now: float, update: ReplicaUpdate) -> None:
        """Add an update of this router."""
        if update.loads is not None:
            self._loads = dict(update.loads)
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
        """Return the bindings to claim."""
        return _as_of(now, self._claims)

    def answered(self) -> None:
        """Clear the wanted sessions, which the store has answered."""
        self._wanted.clear()

    def resolved(self, now: float, valid: tuple[SharedBinding, ...]) -> tuple[SharedBinding, ...]:
        """Apply the store's answer to the claims; return the valid bindings that differ from this router's claims."""
        claims, self._claims = self._claims, {}
        lost: list[SharedBinding] = []
        for held in valid:
            _, claim = claims[held.session]
            if (held.host, held.version) == (claim.host, claim.version):
                self._won.pop(held.session, None)
                self._won[held.session] = now, held
            else:
                lost.append(held)
        self._dropped += _bound(self._won)
        return tuple(lost)

    def loads(self, now: float) -> Mapping[str, SharedLoad] | None:
        """Return the loads if they are due, else None.

        Unchanged loads are due HEARTBEAT_S after the last message. Changed loads are due LOADS_INTERVAL_S after the
        last message.
        """
        since_s = inf if self._sent_loads_s is None else now - self._sent_loads_s
        interval_s = HEARTBEAT_S if self._loads == self._sent_loads else LOADS_INTERVAL_S
        return self._loads if since_s >= interval_s else None

    def update(self, now: float) -> ReplicaUpdate | None:
        """Return the unsent updates without loads and without unclaimed bindings, or None if there are none."""
        if not (self._hotness or self._placements or self._won):
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
            bindings=_as_of(now, self._won),
        )

    def sent_loads(self, now: float, loads: Mapping[str, SharedLoad]) -> None:
        """Record that the store has accepted the result of ``loads``."""
        self._sent_loads_s, self._sent_loads = now, loads

    def sent_update(self) -> None:
        """Clear the items that ``update`` returned, after the store has accepted them."""
        self._hotness.clear()
        self._placements.clear()
        self._placed_hashes = 0
        self._won.clear()


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
