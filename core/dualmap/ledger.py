"""What each instance owes: pending prefill tokens, requests in flight, active KV tokens, requests held for it.

A request is entered at the pick and leaves at its completion, its abort, or when nothing was heard of it for the TTL;
its pending prefill leaves earlier, at the first token. Every number is a sum over live entries kept in step with them,
so none can go negative or leak. What other router replicas owe the same instance comes on top (dualmap.peers).
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import inf, nan

from dualmap.entry import Entry
from dualmap.estimate import PrefillModel, Speed
from dualmap.held import HeldQueue, Waiting
from dualmap.news import SharedLoad
from dualmap.peers import NO_LOAD
from dualmap.standing import Standing

ENTRY_TTL_S = 600.0
# So many requests in a row that the instance itself failed have it left alone for FIRST_SUSPENSION_S, then twice as
# long with every further failure, up to LONGEST_SUSPENSION_S. Any success ends the row.
FAILURES_IN_A_ROW = 3
FIRST_SUSPENSION_S = 1.0
LONGEST_SUSPENSION_S = 30.0


class MemberLoad:
    """The load of one instance, and how fast it has been seen to prefill."""

    def __init__(self, prior_tokens_per_second: float, outdated: "dict[MemberLoad, None]") -> None:
        self._model = PrefillModel(prior_tokens_per_second)
        self.pending_prefill_tokens = 0
        self.active_kv_tokens = 0
        self.in_flight = 0
        self.held = HeldQueue()
        self._peers = NO_LOAD
        # Peers speak far more often than anybody asks what they owe in all: it is summed up when that is asked.
        self._sum_peers: Callable[[], SharedLoad] | None = None
        self.standing = Standing()
        # The loads whose standing is not up to date, shared with the ledger; in the order they changed.
        self._outdated = outdated
        outdated[self] = None
        self.suspended_until_s: float | None = None
        self._failures = 0
        self._suspended_s = -inf
        # Prefills not yet seen to end, in the order they were handed over: engines serve first come first served.
        self._pending: OrderedDict[str, Entry] = OrderedDict()
        # The first of them: it is asked for several times with every event.
        self._head: Entry | None = None
        self._pending_compute_s = 0.0
        # When the prefill at the head of the queue can have begun: the last one's end, or its own dispatch.
        self._head_since_s = 0.0
        # What `opens_s` said since the last change, and of which window; NaN is none.
        self._opens_s: float | None = None
        self._opens_window_s = nan

    @property
    def speed(self) -> Speed:
        """The prefill speed as learnt so far."""
        return self._model.speed

    @property
    def peers(self) -> SharedLoad:
        """What the other replicas owe the instance."""
        if self._sum_peers is not None:
            self._peers, self._sum_peers = self._sum_peers(), None
        return self._peers

    def peers_spoke(self, sum_peers: Callable[[], SharedLoad]) -> None:
        """Take note that what the other replicas owe has changed: to what ``sum_peers`` will say, now or later."""
        self._sum_peers = sum_peers
        self._changed()

    def set_prior(self, tokens_per_second: float) -> None:
        """Take another first guess of the prefill speed, and forget what was learnt."""
        self._model = PrefillModel(tokens_per_second)
        self._changed()

    def observe(self, entry: Entry, busy_s: float) -> None:
        """Learn the prefill speed from a prefill that kept the instance busy for ``busy_s`` seconds."""
        self._model.observe(new_tokens=entry.new_tokens, cached_tokens=entry.matched_tokens, service_s=busy_s)
        self._changed()

    def hold(self, waiting: Waiting) -> None:
        """Count a request that waits in the router for this instance."""
        self.held.add(waiting)
        self._changed()

    def unhold(self, waiting: Waiting) -> None:
        """Forget a request that waited for this instance."""
        self.held.remove(waiting)
        self._changed()

    def take(self, waiting: Waiting) -> None:
        """Take out a request that waited for this instance, since its turn has come."""
        self.held.take(waiting)
        self._changed()

    def update(self, now: float, decode_stall_s: float) -> Standing:
        """Return the standing, brought up to date if need be."""
        if now >= self.standing.until_s:
            self.settle(now)
            self._update(now, decode_stall_s)
        return self.standing

    def _changed(self) -> None:
        self.standing.until_s = -inf
        self._opens_window_s = nan
        self._outdated[self] = None

    def _update(self, now: float, decode_stall_s: float) -> None:
        """Bring the standing up to date; its T_q is ``queue_s``, told as a function of the time to come."""
        standing, peers, held, speed = self.standing, self.peers, self.held, self.speed
        others_s = peers.backlog_s + held.compute_s + peers.held_s
        head = self._head
        standing.ends_s, standing.least_queue_s, standing.until_s = -inf, others_s, inf
        if head is not None:
            began_s, behind_s = self._head_since_s, max(0.0, self._pending_compute_s - head.compute_s)
            stalls_s = began_s + head.compute_s + decode_stall_s
            if now < began_s:
                standing.least_queue_s, standing.until_s = self._pending_compute_s + others_s, began_s
            elif now > stalls_s:
                standing.least_queue_s, standing.until_s = behind_s + (now - began_s) + others_s, -inf
            else:
                standing.ends_s, standing.least_queue_s = (
                    began_s + self._pending_compute_s + others_s,
                    behind_s + others_s,
                )
                standing.until_s = stalls_s if head.streamed else max(began_s, head.dispatched_s) + head.compute_s
        standing.linear_s, standing.quadratic_s = speed.linear_s, speed.quadratic_s
        standing.pending_tokens = self.pending_prefill_tokens + held.tokens + peers.pending_prefill_tokens
        standing.in_flight = self.in_flight + peers.in_flight
        standing.requests = standing.in_flight + len(held)
        standing.active_kv_tokens = self.active_kv_tokens + peers.active_kv_tokens
        standing.placed_tokens = standing.active_kv_tokens + held.tokens

    def settle(self, now: float) -> None:
        """Release the prefills that should have ended by now and whose end nobody will see."""
        while (head := self._head) is not None and not head.streamed:
            ended_s = max(self._head_since_s, head.dispatched_s) + head.compute_s
            if ended_s > now:
                break
            self.first_token(ended_s, head)

    def queue_s(self, now: float, decode_stall_s: float) -> float:
        """Return T_q: seconds until the prefill of a request that is placed here now would begin."""
        return self.backlog_s(now, decode_stall_s) + self.held.compute_s + self.peers.held_s

    def backlog_s(self, now: float, decode_stall_s: float) -> float:
        """Return how many seconds of prefill are handed over and not yet seen to end, by all replicas.

        The head's progress so far is deducted. When the head has been at it for ``decode_stall_s`` longer than its
        own computation should take, the instance is in the paper's decode bottleneck and the time without a
        completed prefill is added (section A.7). Deviation: the paper compares the whole interval with T, which
        flags every prefill that legitimately takes longer than T, as one of 20 000 tokens does.
        """
        head, others_s = self._head, self.peers.backlog_s
        if head is None:
            return others_s
        # Comparisons instead of min and max: this is asked of every member for which requests are held.
        interval_s, compute_s = now - self._head_since_s, head.compute_s
        if interval_s <= 0.0:
            queue_s = self._pending_compute_s
        elif interval_s <= compute_s:
            queue_s = self._pending_compute_s - interval_s
        else:
            queue_s = self._pending_compute_s - compute_s
            if interval_s > compute_s + decode_stall_s:
                queue_s += interval_s
        return (queue_s if queue_s > 0.0 else 0.0) + others_s

    def opens_s(self, window_s: float) -> float | None:
        """Return when passing time alone brings the backlog down to ``window_s``, or None when it takes an event."""
        if self._opens_window_s != window_s:
            self._opens_s, self._opens_window_s = self._find_opens_s(window_s), window_s
        return self._opens_s

    def _find_opens_s(self, window_s: float) -> float | None:
        head = self._head
        if head is None:
            return None
        over_s = self._pending_compute_s + self.peers.backlog_s - window_s
        if over_s <= head.compute_s:
            return self._head_since_s + over_s
        return None if head.streamed else max(self._head_since_s, head.dispatched_s) + head.compute_s

    def has_room(self, prompt_tokens: int, kv_tokens: int, *, output_tokens: float) -> bool:
        """Whether a prompt fits into the instance's KV memory beside what it works on; one alone always does.

        Each request is taken to generate ``output_tokens``.
        """
        requests = self.in_flight + self.peers.in_flight
        prompts = self.active_kv_tokens + self.peers.active_kv_tokens + prompt_tokens
        return requests == 0 or prompts + (requests + 1) * output_tokens <= kv_tokens

    def failed(self, now: float, dispatched_s: float) -> bool:
        """Count a request that the instance failed; return whether it is now to be left alone for a while.

        What had been handed over before it was left alone says nothing new when it fails too.
        """
        if dispatched_s < self._suspended_s:
            return False
        self._failures += 1
        excess = self._failures - FAILURES_IN_A_ROW
        if excess < 0:
            return False
        self._suspended_s = now
        self.suspended_until_s = now + min(FIRST_SUSPENSION_S * 2.0 ** min(excess, 10), LONGEST_SUSPENSION_S)
        return True

    def succeeded(self) -> None:
        """Take note that the instance did what it was asked."""
        self._failures = 0
        self.suspended_until_s = None

    def is_head(self, entry: Entry) -> bool:
        """Whether a request's prefill is the one handed over first of those that have not ended."""
        return self._head is entry

    def enter(self, now: float, entry: Entry) -> None:
        """Count a request that was handed to this instance."""
        if not entry.prefilled:
            if self._head is None:
                # Other replicas' prefills that are there already come first.
                self._head, self._head_since_s = entry, now + self.peers.backlog_s
                self._pending_compute_s = 0.0  # Sheds the rounding error of earlier sums.
            self._pending[entry.request_id] = entry
            self._pending_compute_s += entry.compute_s
            self.pending_prefill_tokens += entry.new_tokens
        self.active_kv_tokens += entry.chain.tokens
        self.in_flight += 1
        self._changed()

    def first_token(self, now: float, entry: Entry) -> float:
        """Release a prefill that ended now; return the seconds it kept the instance busy."""
        busy_since_s = max(self._head_since_s, entry.dispatched_s)
        self._release_prefill(entry)
        entry.prefilled = True
        # Other replicas' prefills are taken to be spread evenly among what is left of ours.
        self._head_since_s = now + self.peers.backlog_s / (len(self._pending) + 1)
        self._changed()
        return now - busy_since_s

    def leave(self, now: float, entry: Entry) -> None:
        """Forget a request that ended, with its prefill where that had not ended before."""
        if not entry.prefilled:
            was_head = self.is_head(entry)
            self._release_prefill(entry)
            if was_head:
                self._head_since_s = now
        self.active_kv_tokens -= entry.chain.tokens
        self.in_flight -= 1
        self._changed()

    def _release_prefill(self, entry: Entry) -> None:
        del self._pending[entry.request_id]
        if self._head is entry:
            self._head = next(iter(self._pending.values()), None)
        self._pending_compute_s -= entry.compute_s
        self.pending_prefill_tokens -= entry.new_tokens


@dataclass(slots=True)
class Ledger:
    """Every live request of a pool and the load of every member that has one or may get one."""

    _prior_tokens_per_second: float
    _loads: dict[str, MemberLoad] = field(default_factory=dict)
    _outdated: dict[MemberLoad, None] = field(default_factory=dict)
    # When the first of the other standings is good no longer.
    _update_s: float = inf
    # Least recently heard of first, so that expiry looks at no more than what has expired.
    _entries: OrderedDict[str, Entry] = field(default_factory=OrderedDict)

    def load(self, member: str) -> MemberLoad:
        """Return the load of a member, starting an empty account where there is none."""
        load = self._loads.get(member)
        if load is None:
            load = self._loads[member] = MemberLoad(self._prior_tokens_per_second, self._outdated)
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
            load.observe(entry, busy_s)
        return entry

    def leave(self, now: float, request_id: str) -> Entry | None:
        """Close a request's account; None when it is unknown or was closed before."""
        entry = self._entries.pop(request_id, None)
        if entry is not None:
            self.load(entry.member).leave(now, entry)
        return entry

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
