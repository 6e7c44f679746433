"""Keeps access log entries about requests of routers that end, until this router has also lost these routers.

Each router notices the end of another one at another time. Until then, it may still receive that router's requests.
"""

from collections import deque
from typing import Final, NamedTuple

from dualmap.ownership.messages import Progress, Step
from dualmap_extproc.request.ending import AccessLogEntry, Ending
from dualmap_extproc.request.ids import router_of

KEPT_S: Final = 5.0
"""The longest time until this router has noticed, too, that the other router has ended."""
KEPT_MAX: Final = 10_000
"""The most entries, the last ones. An entry has less than 1 KiB."""
_STEPS: Final = {
    Ending.FINISHED: Step.FINISHED,
    Ending.REJECTED: Step.ABORTED,
    Ending.ABORTED: Step.ABORTED,
    Ending.FAILED: Step.FAILED,
}


class _Kept(NamedTuple):
    entry: AccessLogEntry
    until_s: float


class Orphans:
    """The last KEPT_MAX entries, each for KEPT_S."""

    def __init__(self) -> None:
        self._kept: deque[_Kept] = deque(maxlen=KEPT_MAX)

    def add(self, now: float, entry: AccessLogEntry) -> None:
        """Keep an entry."""
        while self._kept and self._kept[0].until_s <= now:
            self._kept.popleft()
        self._kept.append(_Kept(entry, now + KEPT_S))

    def take(self, now: float, router: str) -> tuple[AccessLogEntry, ...]:
        """Remove and return the entries about requests of a router."""
        kept = [each for each in self._kept if each.until_s > now]
        self._kept = deque((each for each in kept if router_of(each.entry.request_id) != router), maxlen=KEPT_MAX)
        return tuple(each.entry for each in kept if router_of(each.entry.request_id) == router)


def progress_of(entry: AccessLogEntry) -> tuple[Progress, ...]:
    """Return what an entry says about its request, in the order in which it happened."""
    ended = Progress(request_id=entry.request_id, step=_STEPS[entry.ending], usage=entry.usage)
    if entry.served_endpoint is None:
        return (ended,)
    return Progress(request_id=entry.request_id, step=Step.SERVED, endpoint=entry.served_endpoint), ended
