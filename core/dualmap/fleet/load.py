"""One member's load: what it works on, what is queued for it, and what other replicas sent it.

``MemberLoad`` composes one account per subject and keeps them consistent. Every number is a sum over live requests, so
none can become negative or leak. Reports get lost, and a lost report must not close a member for ever. A prefill that
was overtaken or is silent for long is no longer pending. A request whose end was missed frees its KV (``update``).
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, isnan, nan

from dualmap.fleet.estimate import LearntSpeed, Lesson
from dualmap.fleet.in_flight import InFlightRequest, Stage
from dualmap.fleet.kv import KvAccount
from dualmap.fleet.prefills import PrefillAccount
from dualmap.fleet.samples import Agreement
from dualmap.fleet.suspension import Suspension
from dualmap.queue.request_queue import MemberQueue
from dualmap.replicas.peers import NO_LOAD, OthersLoad


@dataclass(slots=True)
class LoadSummary:
    """A member's load in the numbers that decisions compare; ``MemberLoad`` updates them in place.

    They include queued requests and the other replicas' load, and are valid before ``until_s``. T_q falls with time
    towards ``ends_s``, but not below ``least_queue_s``: the prefills behind the head take their time, however long the
    head has run. ``requests`` and ``placed_tokens`` are what would be in flight if nothing were queued: a queued
    request adds the tokens to compute.
    """

    until_s: float = -inf
    ends_s: float = -inf
    least_queue_s: float = 0.0
    linear_s: float = 0.0
    quadratic_s: float = 0.0
    pending_tokens: int = 0
    in_flight: int = 0
    requests: int = 0
    active_kv_tokens: int = 0
    placed_tokens: int = 0

    def queue_s(self, now: float) -> float:
        """Return T_q at ``now``."""
        return max(self.ends_s - now, self.least_queue_s)


class ReplicasLoad:
    """The load that the other router replicas put on one member."""

    def __init__(self) -> None:
        self.busy_s = -inf
        """The last time at which another replica is known to have had prefills at the member."""
        self._load: OthersLoad = NO_LOAD
        # Replicas report far more often than their sum is read, so the sum is computed on demand.
        self._sum: Callable[[], OthersLoad] | None = None

    @property
    def load(self) -> OthersLoad:
        """The sum of the other replicas' loads."""
        if self._sum is not None:
            self._load, self._sum = self._sum(), None
        return self._load

    def changed(self, sum_loads: Callable[[], OthersLoad]) -> None:
        """Take note that the sum changed; ``sum_loads`` computes it."""
        self._sum = sum_loads

    def share(self, whole: float) -> float:
        """Return this replica's equal share of what all replicas use of the member together.

        A replica may always use its share, so that false reports of another replica cannot close the member.
        """
        return whole / (self.load.replicas + 1)

    def busy(self, at_s: float) -> None:
        """Take note that another replica had prefills at the member at ``at_s``."""
        self.busy_s = max(at_s, self.busy_s)


class MemberLoad:
    """The load of one member.

    ``agreement``, ``outdated`` and ``redispatch`` are shared by all loads of a pool. A load that changes adds itself to
    ``outdated``, and to ``redispatch`` if requests are queued for it; both keep the order of the changes.
    """

    def __init__(
        self,
        prior_tokens_per_second: float,
        agreement: Agreement,
        outdated: "dict[MemberLoad, None]",
        redispatch: "dict[MemberLoad, None]",
    ) -> None:
        self.prefills = PrefillAccount()
        self.kv = KvAccount()
        self.speed = LearntSpeed(prior_tokens_per_second, agreement)
        self.suspension = Suspension()
        self.queue = MemberQueue(self._changed)
        self.others = ReplicasLoad()
        self.summary = LoadSummary()
        self.in_flight = 0
        """Every request sent to the member and not known to have ended, silent ones included."""
        self._outdated = outdated
        outdated[self] = None
        self._redispatch = redispatch
        # The time of the next overdue event; NaN if it must be recomputed.
        self._overdue_s = nan
        # When the backlog reaches the dispatch window, and for which window that was computed; NaN for none.
        self._opens_s = inf
        self._opens_window_s = nan

    @property
    def working(self) -> int:
        """How many requests the member is believed to work on: those in flight without the silent ones."""
        return len(self.prefills.pending) + len(self.kv.decoding)

    def set_prior(self, tokens_per_second: float, agreement: Agreement) -> None:
        """Take another prior of the prefill speed and forget what was learnt."""
        self.speed = LearntSpeed(tokens_per_second, agreement)
        self._changed()

    def others_changed(self, sum_loads: Callable[[], OthersLoad]) -> None:
        """Take note that the other replicas' load changed; ``sum_loads`` computes it."""
        self.others.changed(sum_loads)
        self._changed()

    def enter(self, now: float, request: InFlightRequest) -> None:
        """Count a request that was sent to this member."""
        self.kv.add(request)
        if request.prefilled:
            self.kv.decode(now, request)
        else:
            request.stage = Stage.PENDING
            # The prefills that other replicas sent before come first.
            self.prefills.add(request, now + self.others.load.backlog_s)
        self.in_flight += 1
        self._changed()

    def first_token(self, now: float, request: InFlightRequest) -> None:
        """Record that a prefill ended now, and learn the speed from it."""
        prefills = self.prefills
        # A prefill that overtook others (chunked prefill, short before long) is no sample of the speed.
        in_order, busy_s = prefills.head is request, now - prefills.busy_since_s(request)
        if request.stage is Stage.PENDING:
            # Engines serve first come, first served: the prefills before it ended without a report. If the scheduler
            # let this one pass instead, they delay nothing; their first tokens may still come and teach no speed.
            while (passed := prefills.head) is not None and passed is not request:
                self._end_prefill(now, passed)
            self._end_prefill(now, request)
        request.prefilled = True
        # Assume that other replicas' prefills are spread evenly among our remaining ones.
        others_s = self.others.load.backlog_s
        prefills.restart(now + others_s / (len(prefills.pending) + 1))
        # A prefill that may have waited behind another replica's is no sample of the speed either.
        if in_order and request.streamed and request.alone and not others_s:
            request.lesson = self.speed.observe(
                now,
                client=request.client,
                new_tokens=request.new_tokens,
                cached_tokens=request.matched_tokens,
                service_s=busy_s,
                solo=self.others.busy_s < now - busy_s,
            )
        self._changed()

    def retract(self, lesson: Lesson) -> None:
        """Take back what was learnt from a prefill."""
        # A pool with another prior may have replaced the speed that learnt it.
        lesson.learnt_by.retract(lesson)
        self._changed()

    def heard(self, now: float, request: InFlightRequest) -> None:
        """Record that a request is alive; a silent one counts as decoding again."""
        if request.stage is Stage.PENDING:
            return
        if request.stage is Stage.SILENT:
            self.kv.add(request)
        self.kv.decode(now, request)
        self._changed()

    def leave(self, now: float, request: InFlightRequest) -> None:
        """Forget a request that ended, and its prefill if that is pending."""
        if request.stage is Stage.PENDING:
            was_head = self.prefills.head is request
            self.prefills.remove(request)
            if was_head:
                self.prefills.restart(now)
        self.kv.remove(request)
        self.in_flight -= 1
        self._changed()

    def update(self, now: float, decode_stall_s: float) -> LoadSummary:
        """Return the summary, brought up to date where it is no longer valid."""
        if now >= self.summary.until_s:
            self.end_overdue(now)
            self._summarize(now, decode_stall_s)
        return self.summary

    def end_overdue(self, now: float) -> None:
        """End the prefills and requests that must have ended by now although no report came.

        A prefill whose answer is not streamed ends on time. A prefill at the head that is silent for long ended without
        a report, as did a decoding request. If the member is stalled instead, the time without a completed prefill
        still counts (``PrefillAccount.backlog_s``) as long as another prefill is pending.
        """
        if self._overdue_s > now:  # Mostly. False for NaN.
            return
        while (overdue_s := self._next_overdue_s()) <= now:
            head = self.prefills.head
            if head is None or self.prefills.overdue_s() > overdue_s:
                self.kv.give_up(self.kv.most_silent)
                self._changed()
            elif head.streamed:
                self.prefills.give_up_head(overdue_s)
                self.kv.decode(overdue_s, head)
                self._changed()
            else:
                self.first_token(overdue_s, head)

    def backlog_s(self, now: float, decode_stall_s: float) -> float:
        """Return how many seconds of prefill all replicas sent that are not seen to have ended."""
        return self.prefills.backlog_s(now, decode_stall_s) + self.others.load.backlog_s

    def within_share(self, now: float, decode_stall_s: float, window_s: float) -> bool:
        """Return whether the backlog of this replica alone is within its share of the dispatch window."""
        return self.prefills.backlog_s(now, decode_stall_s) <= self.others.share(window_s)

    def queue_s(self, now: float, decode_stall_s: float) -> float:
        """Return T_q: seconds until the prefill of a request placed here now would start."""
        return self.backlog_s(now, decode_stall_s) + self.queue.compute_s + self.others.load.held_s

    def dispatches_s(self, window_s: float, *, after_s: float, share_after_s: float) -> float | None:
        """Return when time alone may let a queued request be dispatched; None if that takes an event.

        That is when the backlog comes down to ``window_s``, when something is overdue, or when the oldest queued
        request may use this replica's share, whichever comes first after ``after_s``.
        """
        if self._opens_window_s != window_s:
            self._opens_s = self.prefills.reaches_s(window_s - self.others.load.backlog_s)
            self._opens_window_s = window_s
        times_s = (self._opens_s, self._next_overdue_s(), self._share_opens_s(window_s, share_after_s))
        return min((each for each in times_s if after_s < each < inf), default=None)

    def has_room(self, prompt_tokens: int, kv_tokens: int, *, output_tokens: float) -> bool:
        """Whether a prompt fits into the member's KV memory beside its requests; a member without any has room.

        Each request is expected to generate ``output_tokens``.
        """
        others = self.others.load
        requests = self.working + others.in_flight
        prompts = self.kv.tokens + others.active_kv_tokens + prompt_tokens
        return requests == 0 or prompts + (requests + 1) * output_tokens <= kv_tokens

    def has_room_in_share(self, prompt_tokens: int, kv_tokens: int, *, output_tokens: float) -> bool:
        """Whether a prompt fits into this replica's share of the member's KV memory beside this replica's requests."""
        tokens = self.kv.tokens + prompt_tokens + (self.working + 1) * output_tokens
        return self.working == 0 or tokens <= self.others.share(kv_tokens)

    def _share_opens_s(self, window_s: float, share_after_s: float) -> float:
        """Return when the oldest queued request may use this replica's share of the member; infinity if never."""
        if not self.others.load.replicas:
            return inf
        waited_s, prefills = self.queue.oldest_arrived_s + share_after_s, self.prefills
        return waited_s if prefills.head is None else max(waited_s, prefills.reaches_s(self.others.share(window_s)))

    def _changed(self) -> None:
        self.summary.until_s = -inf
        self._opens_window_s = self._overdue_s = nan
        self._outdated[self] = None
        if self.queue.requests:
            self._redispatch[self] = None

    def _next_overdue_s(self) -> float:
        if isnan(self._overdue_s):
            self._overdue_s = min(self.prefills.overdue_s(), self.kv.overdue_s())
        return self._overdue_s

    def _summarize(self, now: float, decode_stall_s: float) -> None:
        summary, others, queue, speed = self.summary, self.others.load, self.queue, self.speed.current
        others_s = others.backlog_s + queue.compute_s + others.held_s
        ends_s, least_s, until_s = self.prefills.forecast(now, decode_stall_s)
        summary.ends_s, summary.least_queue_s = ends_s + others_s, least_s + others_s
        summary.until_s = min(until_s, self._next_overdue_s())
        summary.linear_s, summary.quadratic_s = speed.linear_s, speed.quadratic_s
        summary.pending_tokens = self.prefills.tokens + queue.tokens + others.pending_prefill_tokens
        summary.in_flight = self.working + others.in_flight
        summary.requests = summary.in_flight + len(queue.requests)
        summary.active_kv_tokens = self.kv.tokens + others.active_kv_tokens
        summary.placed_tokens = summary.active_kv_tokens + queue.tokens

    def _end_prefill(self, now: float, request: InFlightRequest) -> None:
        self.prefills.remove(request)
        self.kv.decode(now, request)
