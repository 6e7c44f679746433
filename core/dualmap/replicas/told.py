"""The loads that this replica has told the others, which decide when the others need a new report."""

from collections.abc import Mapping
from math import inf
from typing import Final

from dualmap.replicas.peers import PEER_TTL_S
from dualmap.replicas.update import SharedLoad

KEEP_ALIVE_S: Final = PEER_TTL_S / 3
"""The longest time without a report. Other replicas drop a replica without a report for PEER_TTL_S."""


class ToldLoads:
    """The last report of this replica's loads."""

    def __init__(self) -> None:
        self._loads: Mapping[str, SharedLoad] = {}
        self._told_s = -inf

    def news(self, now: float, loads: Mapping[str, SharedLoad]) -> Mapping[str, SharedLoad] | None:
        """Return the loads if an event changed them or a report is due, else None."""
        if now - self._told_s < KEEP_ALIVE_S and loads.keys() == self._loads.keys():
            known = self._loads
            if all(_is_unchanged(known[member], load) for member, load in loads.items()):
                return None
        self._loads, self._told_s = loads, now
        return loads


def _is_unchanged(told: SharedLoad, load: SharedLoad) -> bool:
    """Return whether only time has passed since a report: time alone lets the backlog fall, and changes nothing else.

    The others keep the reported backlog until the prefill's first token. Exploratory simulations, which are not
    recorded, showed no lower attainment than with a report of each fall.
    """
    return (
        load.backlog_s <= told.backlog_s
        and load.held_s == told.held_s
        and load.pending_prefill_tokens == told.pending_prefill_tokens
        and load.in_flight == told.in_flight
        and load.active_kv_tokens == told.active_kv_tokens
    )
