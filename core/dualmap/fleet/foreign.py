"""The requests at the members that came through no router of the pool, such as those of another gateway or a batch job.

An engine reports all its requests. The requests that this router and the other replicas have in flight there are
subtracted. Router and engine observe a request's start and end at slightly different times. Therefore, a foreign
request counts only if two consecutive reports of the engine contain it. It counts with the mean prompt of the requests
that this router sent to the pool's members.

A busy engine may answer late or not at all. Therefore, the load of the last report stays valid for FOREIGN_TTL_S.
"""

from math import ceil
from typing import Final

from dualmap.engines.profile import EngineProfile
from dualmap.fleet.load import MemberLoad
from dualmap.replicas.peers import OthersLoad
from dualmap.replicas.update import SharedLoad

FOREIGN_TTL_S: Final = 10.0
"""The time after an engine's last report until its foreign requests no longer count."""
# The initial estimate of the mean prompt tokens of a request, and the weight of each dispatched request in that mean.
_PROMPT_TOKENS: Final = 1000.0
_PROMPT_WEIGHT: Final = 0.02


class ForeignWork:
    """The foreign requests at each member."""

    def __init__(self) -> None:
        self._prompt_tokens = _PROMPT_TOKENS
        # The load and the time of the last report. The member with the oldest report is first.
        self._loads: dict[str, tuple[SharedLoad, float]] = {}
        # The foreign requests of the last report: all of them, and those that wait.
        self._last: dict[str, tuple[int, int]] = {}

    def load(self, member: str) -> SharedLoad | None:
        """Return the load of the foreign requests at a member; None without any."""
        known = self._loads.get(member)
        return None if known is None else known[0]

    def on_dispatched(self, prompt_tokens: int) -> None:
        """Count a prompt that this router sent to a member in the mean prompt."""
        self._prompt_tokens += _PROMPT_WEIGHT * (prompt_tokens - self._prompt_tokens)

    def count(self, member: str, profile: EngineProfile, own: MemberLoad, peers: OthersLoad) -> SharedLoad | None:
        """Take an engine's report; return the load of the foreign requests that count now, None without any.

        ``own`` is this router's load at the member, and ``peers`` is the load of the other replicas there.
        """
        tokens = max(1, round(self._prompt_tokens))
        prompt_s = own.speed.current.compute_s(tokens, 0)
        own_prefills = sum(each.sequences for each in own.prefills.pending.values())
        # Replicas report the time of their prefills, but not the number.
        peers_prefills = min(peers.in_flight, ceil(peers.backlog_s / prompt_s))
        # The waiting requests have no prefill yet.
        waiting, running = profile.waiting or 0, profile.running or 0
        requests = max(0, waiting + running - own.kv.sequences - peers.in_flight)
        waiting = max(0, waiting - own_prefills - peers_prefills)
        before = self._last.get(member, (0, 0))
        self._last[member] = requests, waiting
        requests = min(requests, before[0])
        waiting = min(waiting, before[1], requests)
        if not requests:
            return None
        active_kv_tokens, used_tokens = requests * tokens, profile.used_tokens
        return SharedLoad(
            pending_prefill_tokens=waiting * tokens,
            backlog_s=waiting * prompt_s,
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
