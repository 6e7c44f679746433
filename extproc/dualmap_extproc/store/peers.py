"""The routers of which a router uses updates: a bounded number, and those known for the longest time first.

A router has no list of the other routers. Anything with access to the store may therefore write updates in the name of
any number of routers.
"""

from collections.abc import Iterable
from typing import Final

from dualmap.scaling.reports import REMEMBERED_S, ROUTERS_MAX

PEERS_MAX: Final = ROUTERS_MAX
"""The most other routers of a pool."""


class KnownPeers:
    """The other routers of one pool. A router keeps its place until it has been silent for REMEMBERED_S."""

    def __init__(self) -> None:
        self._heard_s: dict[str, float] = {}

    def refused(self, now: float, peers: Iterable[str]) -> set[str]:
        """Return the routers of which this router uses no updates; ``peers`` are the routers of an answer in order."""
        new = dict.fromkeys(peers, now)
        if len(self._heard_s.keys() | new.keys()) > PEERS_MAX:
            self._heard_s = {peer: at_s for peer, at_s in self._heard_s.items() if now - at_s < REMEMBERED_S}
        unknown = [peer for peer in new if peer not in self._heard_s]
        refused = set(unknown[max(0, PEERS_MAX - len(self._heard_s)) :])
        self._heard_s.update((peer, at_s) for peer, at_s in new.items() if peer not in refused)
        return refused
