"""What one instance owes: pending prefill tokens, requests in flight, active KV tokens, requests held for it.

Every number is a sum over live entries kept in step with them, so none can go negative or leak. What other router
replicas owe the same instance comes on top (dualmap.replicas.peers). ``ledger`` keeps one of these for each member.

Reports get lost, and one that is lost must not shut an instance: a prefill is given up as pending once it was overtaken
or nothing was heard for long, and the KV of a request that ended unheard is not counted for ever (``settle``).
"""

from collections import OrderedDict
from collections.abc import Callable
from math import inf, isnan, nan

from dualmap.fleet.entry import Entry, Stage
from dualmap.fleet.estimate import FORGET, PrefillModel, Speed
from dualmap.fleet.standing import Standing
from dualmap.queue.held import HeldQueue, Waiting
from dualmap.replicas.news import SharedLoad
from dualmap.replicas.peers import NO_LOAD

# A prefill that was next for that long, or for so many times what it should take, while no other ended either, is taken
# to have ended unheard.
SILENT_PREFILL_S = 30.0
SILENT_PREFILL_FACTOR = 10.0
# So is a request that is decoded and was silent for that long (nobody need say more often that one is alive) and for so
# many times as long as those are that end, in the mean; each of those counts so much for the mean.
SILENT_DECODE_S = 120.0
SILENT_DECODE_FACTOR = 10.0
_SILENCE_WEIGHT = 0.05
# So many requests in a row that the instance itself failed have it left alone for FIRST_SUSPENSION_S, then twice as
# long with every further failure, up to LONGEST_SUSPENSION_S. Any success ends the row.
FAILURES_IN_A_ROW = 3
FIRST_SUSPENSION_S = 1.0
LONGEST_SUSPENSION_S = 30.0
# So many undisturbed prefills among the last 50 or so say how fast an instance is by itself, fewer as much less: they
# count as much as its first guess then.
_SOLO_SAMPLES = 4.0


class MemberLoad:
    """The load of one instance, and how fast it has been seen to prefill."""

    def __init__(
        self,
        prior_tokens_per_second: float,
        outdated: "dict[MemberLoad, None]",
        reopening: "dict[MemberLoad, None]",
    ) -> None:
        self._model = PrefillModel(prior_tokens_per_second)
        # The same of those prefills only that no other replica's came between, as far as these have said.
        self._solo_model = PrefillModel(prior_tokens_per_second)
        # How many such there were lately, of as many prefills as a model remembers.
        self._solo_samples = 0.0
        self._peers_busy_s = -inf
        self.pending_prefill_tokens = 0
        self.active_kv_tokens = 0
        self.in_flight = 0
        """Every request handed over and not known to have ended, those given up as silent included."""
        self.held = HeldQueue()
        self._peers = NO_LOAD
        # Peers speak far more often than anybody asks what they owe in all: it is summed up when that is asked.
        self._sum_peers: Callable[[], SharedLoad] | None = None
        self.standing = Standing()
        # The loads whose standing is not up to date, shared with the ledger; in the order they changed.
        self._outdated = outdated
        outdated[self] = None
        # Those that hold requests and may let them in at another time than before (dualmap.queue.dispatch).
        self._reopening = reopening
        self.suspended_until_s: float | None = None
        self._failures = 0
        self._suspended_s = -inf
        # Prefills not yet seen to end, in the order they were handed over: engines serve first come first served.
        self._pending: OrderedDict[str, Entry] = OrderedDict()
        # The first of them: it is asked for several times with every event.
        self._head: Entry | None = None
        # Requests that are decoded; the one that is silent for longest first.
        self._decoding: OrderedDict[str, Entry] = OrderedDict()
        self._mean_silence_s = 0.0
        self._pending_compute_s = 0.0
        # When the prefill at the head of the queue can have begun: the last one's end, or its own dispatch.
        self._head_since_s = 0.0
        # Since when the head was next and nothing ended: later than that where the one before it was given up.
        self._silent_since_s = 0.0
        # When there is something to settle, NaN when that is to be found anew.
        self._settles_s = nan
        # What `opens_s` said since the last change, and of which window; NaN is none.
        self._opens_s = inf
        self._opens_window_s = nan

    @property
    def working(self) -> int:
        """How many requests the instance is believed to work on: those in flight but for the silent."""
        return len(self._pending) + len(self._decoding)

    @property
    def speed(self) -> Speed:
        """The prefill speed as learnt so far: what a request may count on, beside what other replicas do not say."""
        return self._model.speed

    @property
    def solo_tokens_per_second(self) -> float:
        """The speed when other replicas leave the instance alone: what it can do, for all of them together.

        News of others' prefills is late, so that ``speed`` counts some of their time for ours, the more the more
        replicas there are. Where they hardly ever leave it alone, as in overload, it is nearer to ``speed``, which goes
        on being learnt.
        """
        known, linear_s = min(self._solo_samples / _SOLO_SAMPLES, 1.0), self.speed.linear_s
        return 1.0 / (linear_s + known * (self._solo_model.speed.linear_s - linear_s))

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

    def peer_busy(self, said_s: float) -> None:
        """Take note that another replica had prefills under way at the instance at ``said_s``."""
        self._peers_busy_s = max(said_s, self._peers_busy_s)

    def set_prior(self, tokens_per_second: float) -> None:
        """Take another first guess of the prefill speed, and forget what was learnt."""
        self._model = PrefillModel(tokens_per_second)
        self._solo_model = PrefillModel(tokens_per_second)
        self._solo_samples = 0.0
        self._changed()

    def observe(self, now: float, entry: Entry, busy_s: float) -> None:
        """Learn the prefill speed from a prefill that ended now and kept the instance busy for ``busy_s`` seconds."""
        new_tokens, cached_tokens = entry.new_tokens, entry.matched_tokens
        self._model.observe(new_tokens=new_tokens, cached_tokens=cached_tokens, service_s=busy_s)
        self._solo_samples *= FORGET
        if self._peers_busy_s < now - busy_s:
            self._solo_samples += 1.0
            self._solo_model.observe(new_tokens=new_tokens, cached_tokens=cached_tokens, service_s=busy_s)
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
        self._opens_window_s = self._settles_s = nan
        self._outdated[self] = None
        if self.held:
            self._reopening[self] = None

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
                standing.until_s = stalls_s
        standing.until_s = min(standing.until_s, self._next_settling_s())
        standing.linear_s, standing.quadratic_s = speed.linear_s, speed.quadratic_s
        standing.pending_tokens = self.pending_prefill_tokens + held.tokens + peers.pending_prefill_tokens
        standing.in_flight = self.working + peers.in_flight
        standing.requests = standing.in_flight + len(held)
        standing.active_kv_tokens = self.active_kv_tokens + peers.active_kv_tokens
        standing.placed_tokens = standing.active_kv_tokens + held.tokens

    def settle(self, now: float) -> None:
        """Give up what must have ended by now, though nobody has said or will say so.

        A prefill whose answer comes whole ends when it should. Any other that is next and silent for long is taken to
        have ended unheard, and so is a request whose decode is. Should the instance be stalled instead, the time
        without a completed prefill goes on to count (``backlog_s``), for as long as there is any other prefill.
        """
        while (settles_s := self._next_settling_s()) <= now:
            head = self._head
            if head is None or self._head_settles_s(head) > settles_s:
                self._silence(next(iter(self._decoding.values())))
            elif head.streamed:
                self._end_prefill(settles_s, head)
                self._silent_since_s = settles_s
                self._changed()
            else:
                self.first_token(settles_s, head)

    def _next_settling_s(self) -> float:
        """Return when there will be something to settle."""
        if isnan(self._settles_s):
            self._settles_s = inf if self._head is None else self._head_settles_s(self._head)
            if self._decoding:
                silence_s = max(SILENT_DECODE_S, SILENT_DECODE_FACTOR * self._mean_silence_s)
                silent_since_s = next(iter(self._decoding.values())).silent_since_s
                self._settles_s = min(self._settles_s, silent_since_s + silence_s)
        return self._settles_s

    def _head_settles_s(self, head: Entry) -> float:
        if head.streamed:
            return self._silent_since_s + max(SILENT_PREFILL_S, SILENT_PREFILL_FACTOR * head.compute_s)
        return max(self._head_since_s, head.dispatched_s) + head.compute_s

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

    def opens_s(self, window_s: float, *, after_s: float) -> float | None:
        """Return when passing time alone may let in what is held, or None when it takes an event.

        That is when the backlog comes down to ``window_s`` or something is settled, whichever comes first after
        ``after_s``.
        """
        if self._opens_window_s != window_s:
            self._opens_s, self._opens_window_s = self._find_opens_s(window_s), window_s
        settles_s = self._next_settling_s()
        return min((each for each in (self._opens_s, settles_s) if after_s < each < inf), default=None)

    def _find_opens_s(self, window_s: float) -> float:
        head = self._head
        if head is None:
            return inf
        over_s = self._pending_compute_s + self.peers.backlog_s - window_s
        return self._head_since_s + over_s if over_s <= head.compute_s else inf

    def has_room(self, prompt_tokens: int, kv_tokens: int, *, output_tokens: float) -> bool:
        """Whether a prompt fits into the instance's KV memory beside what it works on; one alone always does.

        Each request is taken to generate ``output_tokens``.
        """
        requests = self.working + self.peers.in_flight
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
        if entry.prefilled:
            self._decode(now, entry)
        else:
            if self._head is None:
                # Other replicas' prefills that are there already come first.
                self._head = entry
                self._head_since_s = self._silent_since_s = now + self.peers.backlog_s
                self._pending_compute_s = 0.0  # Sheds the rounding error of earlier sums.
            entry.stage = Stage.PENDING
            self._pending[entry.request_id] = entry
            self._pending_compute_s += entry.compute_s
            self.pending_prefill_tokens += entry.new_tokens
        self.active_kv_tokens += entry.chain.tokens
        self.in_flight += 1
        self._changed()

    def first_token(self, now: float, entry: Entry) -> float:
        """Take note that a prefill ended now, and release it; return the seconds it kept the instance busy."""
        busy_since_s = max(self._head_since_s, entry.dispatched_s)
        if entry.stage is Stage.PENDING:
            # Engines serve first come first served: whoever was to end before has ended unheard. Or it was passed, as
            # some schedulers allow, and holds up nobody; its first token may still come, and teaches no speed.
            while (passed := self._head) is not None and passed is not entry:
                self._end_prefill(now, passed)
            self._end_prefill(now, entry)
        entry.prefilled = True
        # Other replicas' prefills are taken to be spread evenly among what is left of ours.
        self._head_since_s = self._silent_since_s = now + self.peers.backlog_s / (len(self._pending) + 1)
        self._changed()
        return now - busy_since_s

    def heard(self, now: float, entry: Entry) -> None:
        """Take note that a request is alive; one that was taken to have ended is decoded again."""
        if entry.stage is Stage.PENDING:
            return
        if entry.stage is Stage.SILENT:
            self.active_kv_tokens += entry.chain.tokens
        self._decode(now, entry)
        self._changed()

    def ended(self, now: float, entry: Entry) -> None:
        """Learn from a request that ended for how long those are silent that are alive."""
        if entry.prefilled:
            self._mean_silence_s += _SILENCE_WEIGHT * (now - entry.silent_since_s - self._mean_silence_s)

    def leave(self, now: float, entry: Entry) -> None:
        """Forget a request that ended, with its prefill where that had not ended before."""
        if entry.stage is Stage.PENDING:
            was_head = self.is_head(entry)
            self._release_prefill(entry)
            if was_head:
                self._head_since_s = self._silent_since_s = now
        if entry.stage is Stage.DECODING:
            del self._decoding[entry.request_id]
        if entry.stage is not Stage.SILENT:
            self.active_kv_tokens -= entry.chain.tokens
        self.in_flight -= 1
        self._changed()

    def _end_prefill(self, now: float, entry: Entry) -> None:
        self._release_prefill(entry)
        self._decode(now, entry)

    def _decode(self, now: float, entry: Entry) -> None:
        entry.stage, entry.silent_since_s = Stage.DECODING, now
        self._decoding[entry.request_id] = entry
        self._decoding.move_to_end(entry.request_id)

    def _silence(self, entry: Entry) -> None:
        entry.stage = Stage.SILENT
        del self._decoding[entry.request_id]
        self.active_kv_tokens -= entry.chain.tokens
        self._changed()

    def _release_prefill(self, entry: Entry) -> None:
        del self._pending[entry.request_id]
        if self._head is entry:
            self._head = next(iter(self._pending.values()), None)
        self._pending_compute_s -= entry.compute_s
        self.pending_prefill_tokens -= entry.new_tokens
