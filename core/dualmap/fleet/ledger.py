"""The books of a pool: every live request, and with them the load of every member (dualmap.fleet.load).

A request is entered at the pick and leaves at its completion, its abort, or when nothing was heard of it for the TTL;
its pending prefill leaves earlier, at the first token.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf

from dualmap.fleet.entry import Entry
from dualmap.fleet.load import MemberLoad

ENTRY_TTL_S = 600.0


@dataclass(slots=True)
class Ledger:
    """Every live request of a pool and the load of every member that has one or may get one."""

    _prior_tokens_per_second: float
    _loads: dict[str, MemberLoad] = field(default_factory=dict)
    _outdated: dict[MemberLoad, None] = field(default_factory=dict)
    reopening: dict[MemberLoad, None] = field(default_factory=dict)
    """The loads that hold requests and have changed since ``dualmap.queue.dispatch`` looked at them."""
    # When the first of the other standings is good no longer.
    _update_s: float = inf
    # Least recently heard of first, so that expiry looks at no more than what has expired.
    _entries: OrderedDict[str, Entry] = field(default_factory=OrderedDict)

    def load(self, member: str) -> MemberLoad:
        """Return the load of a member, starting an empty account where there is none."""
        load = self._loads.get(member)
        if load is None:
            load = self._loads[member] = MemberLoad(self._prior_tokens_per_second, self._outdated, self.reopening)
        return load

    def update(self, now: float, decode_stall_s: float) -> None:
        """Bring every member's standing up to date, looking only at those that have changed."""
        if now >= self._update_s:
            self._outdated.update(dict.fromkeys(self._loads.values()))
            self._update_s = inf
        outdated = tuple(self._outdated)
        self._outdated.clear()
        for load in outdated:
            until_s = load.update(now, decode_stall_s).until_s
            if until_s > now:
                self._update_s = min(self._update_s, until_s)
            else:
                self._outdated[load] = None

    def set_prior(self, tokens_per_second: float) -> None:
        """Take another first guess of the prefill speed; what was learnt from the old one starts afresh."""
        if tokens_per_second != self._prior_tokens_per_second:
            self._prior_tokens_per_second = tokens_per_second
            for load in self._loads.values():
                load.set_prior(tokens_per_second)

    def entry(self, request_id: str) -> Entry | None:
        """Return a live request, or None when it is unknown or has ended."""
        return self._entries.get(request_id)

    def enter(self, now: float, entry: Entry) -> None:
        """Book a request that was just picked for ``entry.member``; its id must not be live."""
        assert entry.request_id not in self._entries, f"request {entry.request_id} is already in the books"
        self._entries[entry.request_id] = entry
        self.load(entry.member).enter(now, entry)

    def first_token(self, now: float, request_id: str) -> Entry | None:
        """Release a request's pending prefill and learn from it; None when it is unknown or was released before."""
        entry = self.heard(now, request_id)
        if entry is None or entry.prefilled:
            return None
        load = self.load(entry.member)
        # Prefills that overtake others (chunked prefill, short behind long) say nothing about the speed of one.
        in_order = load.is_head(entry)
        busy_s = load.first_token(now, entry)
        load.succeeded()
        # Nor does one that may have waited behind what another replica sent.
        if in_order and entry.streamed and entry.alone and not load.peers.backlog_s:
            load.observe(now, entry, busy_s)
        return entry

    def leave(self, now: float, request_id: str) -> Entry | None:
        """Close a request's account; None when it is unknown or was closed before."""
        entry = self._entries.pop(request_id, None)
        if entry is not None:
            self.load(entry.member).leave(now, entry)
        return entry

    def finish(self, now: float, request_id: str) -> Entry | None:
        """Close the account of a request that ended as it should, and learn from it; else like ``leave``."""
        entry = self._entries.get(request_id)
        if entry is not None:
            self.load(entry.member).ended(now, entry)
        return self.leave(now, request_id)

    def move(self, now: float, entry: Entry, *, to: str, matched_tokens: int, compute_s: float) -> None:
        """Rebook a live request to the member that really serves it."""
        self.load(entry.member).leave(now, entry)
        entry.member, entry.matched_tokens, entry.compute_s = to, matched_tokens, compute_s
        self.load(to).enter(now, entry)

    def heard(self, now: float, request_id: str) -> Entry | None:
        """Put off a request's expiry since something was heard of it; return it, or None when it is unknown."""
        entry = self._entries.get(request_id)
        if entry is not None:
            entry.heard_s = now
            self.load(entry.member).heard(now, entry)
            self._entries.move_to_end(request_id)
        return entry

    def next_expiry(self) -> float | None:
        """Return when the entry that was silent for longest expires, or None when there is none."""
        oldest = next(iter(self._entries.values()), None)
        return None if oldest is None else oldest.heard_s + ENTRY_TTL_S

    def expire(self, now: float) -> list[Entry]:
        """Close the accounts of requests that nothing was heard of for the TTL."""
        expired = []
        while (expiry := self.next_expiry()) is not None and expiry <= now:
            entry = self.leave(now, next(iter(self._entries)))
            assert entry is not None
            expired.append(entry)
        return expired

    def retain(self, members: set[str]) -> None:
        """Drop the accounts of members that are gone and owe nothing."""
        for member in [name for name, load in self._loads.items() if name not in members and not load.in_flight]:
            self._outdated.pop(self._loads.pop(member), None)

    def items(self) -> Iterable[tuple[str, MemberLoad]]:
        """Return every account with its member's id."""
        return self._loads.items()
