"""The requests at the members that came through none of the pool's routers, such as another gateway's or a batch job's.

An engine reports all its requests. The requests that this router and the other replicas have in flight there are
subtracted. Router and engine observe a request's start and end at slightly different times. Therefore, a foreign
request counts only if two consecutive reports of the engine contain it.

A busy engine may answer late or not at all. Therefore, the load of the last report stays valid for FOREIGN_TTL_S.
"""

from typing import Final, NamedTuple

from dualmap.replicas.update import SharedLoad

FOREIGN_TTL_S: Final = 10.0
"""The time after an engine's last report until its foreign requests no longer count."""


class Prompt(NamedTuple):
    """The mean prompt of a pool: its tokens, and the time to compute them at a member."""

    tokens: int
    compute_s: float


class ForeignWork:
    """The foreign requests at each member."""

    def __init__(self) -> None:
        # The load and the time of the last report. The member with the oldest report is first.
        self._loads: dict[str, tuple[SharedLoad, float]] = {}
        # The foreign requests of the last report: all of them, and those that wait.
        self._last: dict[str, tuple[int, int]] = {}

    def load(self, member: str) -> SharedLoad | None:
        """Return the load of the foreign requests at a member; None without any."""
        known = self._loads.get(member)
        return None if known is None else known[0]

    def count(
        self, member: str, requests: int, waiting: int, prompt: Prompt, used_tokens: int | None
    ) -> SharedLoad | None:
        """Take an engine's report of foreign requests; return the load of those that count now, None without any.

        ``waiting`` of the ``requests`` have no prefill yet. Each request has the mean ``prompt``. All requests of the
        engine use ``used_tokens`` KV tokens, None if it does not report them.
        """
        before = self._last.get(member, (0, 0))
        self._last[member] = requests, waiting
        requests = min(requests, before[0])
        waiting = min(waiting, before[1], requests)
        if not requests:
            return None
        active_kv_tokens = requests * prompt.tokens
        return SharedLoad(
            pending_prefill_tokens=waiting * prompt.tokens,
            backlog_s=waiting * prompt.compute_s,
            in_flight=requests,
            # Foreign requests may share their prompts, or be shorter than the pool's.
            active_kv_tokens=active_kv_tokens if used_tokens is None else min(active_kv_tokens, used_tokens),
        )

    def put(self, now: float, member: str, load: SharedLoad | None) -> bool:
        """Set the load of the foreign requests at a member, None without any; return whether the load changed."""
        before, _ = self._loads.pop(member, (None, now))
        if load is not None:
            self._loads[member] = load, now
        return load != before

    def forget(self, member: str) -> bool:
        """Forget the reports of a member; return whether the load changed."""
        self._last.pop(member, None)
        return self._loads.pop(member, None) is not None

    def retain(self, members: set[str]) -> None:
        """Forget the reports of all other members."""
        for member in self._last.keys() - members:
            self.forget(member)

    def expire(self, now: float) -> set[str]:
        """Remove the loads of reports that are too old; return their members."""
        expired = set()
        while (expiry := self.next_expiry()) is not None and expiry <= now:
            member = next(iter(self._loads))
            del self._loads[member]
            expired.add(member)
        return expired

    def next_expiry(self) -> float | None:
        """Return the time at which the load of the oldest report expires, or None without any."""
        for _, reported_s in self._loads.values():
            return reported_s + FOREIGN_TTL_S
        return None
