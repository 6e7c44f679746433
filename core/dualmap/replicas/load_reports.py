"""When this router reports its loads to the other routers: after a change, and at least every KEEP_ALIVE_S."""

from collections.abc import Mapping
from math import inf
from typing import Final

from dualmap.replicas.peers import PEER_TTL_S
from dualmap.replicas.update import SharedLoad

KEEP_ALIVE_S: Final = PEER_TTL_S / 3
"""The longest time without a report. Other routers drop a router without a report for PEER_TTL_S."""


class LoadReports:
    """The last report of this router's loads."""

    def __init__(self) -> None:
        self._loads: Mapping[str, SharedLoad] = {}
        self._reported_s = -inf

    def due(self, now: float, loads: Mapping[str, SharedLoad]) -> Mapping[str, SharedLoad] | None:
        """Return the loads if an event changed them or a report is due, else None."""
        if now - self._reported_s < KEEP_ALIVE_S and loads.keys() == self._loads.keys():
            known = self._loads
            if all(_is_unchanged(known[member], load) for member, load in loads.items()):
                return None
        self._loads, self._reported_s = loads, now
        return loads


def _is_unchanged(reported: SharedLoad, load: SharedLoad) -> bool:
    """Return whether only time has passed since a report: with time, the backlog falls, and nothing else changes.

    The others keep the reported backlog until the prefill's first token. Exploratory simulations, which are not
    recorded, showed no lower attainment than with a report of each fall.
    """
    return (
        load.backlog_s <= reported.backlog_s
        and load.held_s == reported.held_s
        and load.pending_prefill_tokens == reported.pending_prefill_tokens
        and load.in_flight == reported.in_flight
        and load.active_kv_tokens == reported.active_kv_tokens
    )
