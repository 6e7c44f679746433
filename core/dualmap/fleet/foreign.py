"""The requests at the members that came through none of the pool's routers, such as another gateway's or a batch job's.

An engine reports all its requests. The requests that this router and the other replicas have in flight there are
subtracted. Router and engine observe a request's start and end at slightly different times. Therefore, a foreign
request counts only if two consecutive reports of the engine contain it.
"""

from dualmap.replicas.peers import OthersLoad, Peers
from dualmap.replicas.update import SharedLoad


class ForeignWork:
    """The foreign requests at each member. A report of an engine is valid as long as a report of a replica."""

    def __init__(self) -> None:
        self._loads = Peers()
        # The foreign requests of the last report: all of them, and those that wait.
        self._last: dict[str, tuple[int, int]] = {}

    def load(self, member: str) -> OthersLoad:
        """Return the load of the foreign requests at a member."""
        return self._loads.load(member)

    def count(self, member: str, requests: int, waiting: int) -> tuple[int, int]:
        """Return the foreign requests that count now, and how many of them wait; the arguments are a new report's."""
        before = self._last.get(member, (0, 0))
        self._last[member] = requests, waiting
        counted = min(requests, before[0])
        return counted, min(waiting, before[1], counted)

    def put(self, now: float, member: str, load: SharedLoad | None) -> bool:
        """Set the load of the foreign requests at a member, None without any; return whether the load changed."""
        if load is None:
            return bool(self._loads.forget(member))
        self._loads.hear(now, member, {member: load})
        return True

    def forget(self, member: str) -> bool:
        """Forget the reports of a member; return whether the load changed."""
        self._last.pop(member, None)
        return bool(self._loads.forget(member))

    def retain(self, members: set[str]) -> None:
        """Forget the reports of all other members."""
        for member in self._last.keys() - members:
            self.forget(member)

    def expire(self, now: float) -> set[str]:
        """Forget reports that are too old; return their members."""
        return self._loads.expire(now)

    def next_expiry(self) -> float | None:
        """Return the time at which the oldest load expires, or None without any."""
        return self._loads.next_expiry()
