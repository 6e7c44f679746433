"""One member's load: requests in flight, requests queued for the member, and the load of others.

Others are the other router replicas, and the sources whose requests come through no router (``foreign``).

``MemberLoad`` contains one account for each kind of load and keeps the accounts consistent. Every number is a sum over
requests that have not ended, so it cannot become negative or grow without limit. Reports may be lost, and a lost report
must not make a member saturated forever. Therefore, an overtaken prefill and a prefill without reports are no longer
pending after some time. A request with a lost end releases its KV memory (``update``).
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, isnan, nan

from dualmap.fleet.distinct_blocks import DistinctBlocks
from dualmap.fleet.estimate import AwaitedAnswer, EndedAnswer, LearntSpeed, Lesson
from dualmap.fleet.fetches import FetchSpeed
from dualmap.fleet.in_flight import InFlightRequest, Stage
from dualmap.fleet.kv import KvAccount
from dualmap.fleet.prefills import PrefillAccount
from dualmap.fleet.samples import Agreement
from dualmap.fleet.suspension import Suspension
from dualmap.queue.request_queue import MemberQueue
from dualmap.replicas.peers import NO_LOAD, OthersLoad


@dataclass(slots=True)
class LoadSummary:
    """A member's load as the numbers that decisions compare; ``MemberLoad`` updates the summary in place.

    The numbers include queued requests and the load of others, and are valid before ``until_s``. T_q (paper eq.
    7) decreases with time until ``ends_s``, but not below ``least_queue_s``, the compute time of the prefills after the
    head. ``requests`` and ``placed_tokens`` are the requests in flight and KV tokens after a dispatch of all queued
    requests. Each queued request adds its uncached prompt tokens.
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
        """Return T_q (paper eq. 7) at ``now``."""
        left_s = self.ends_s - now
        # Every candidate runs this: max() takes three times as long.
        return left_s if left_s > self.least_queue_s else self.least_queue_s


class ReplicasLoad:
    """The load that others put on one member: the other router replicas, and requests that came through no router.

    The requests that came through no router count as one further replica.
    """

    def __init__(self) -> None:
        self.busy_s = -inf
        """The last time at which another replica or the member's engine reported prefills of others."""
        self._load: OthersLoad = NO_LOAD
        # Reports arrive far more often than the sum is read, so the sum is computed on demand.
        self._sum: Callable[[], OthersLoad] | None = None

    @property
    def load(self) -> OthersLoad:
        """The sum of the others' loads."""
        if self._sum is not None:
            self._load, self._sum = self._sum(), None
        return self._load

    def changed(self, sum_loads: Callable[[], OthersLoad]) -> None:
        """Record that the sum changed; ``sum_loads`` computes the new sum."""
        self._sum = sum_loads

    def share(self, whole: float) -> float:
        """Return this replica's equal share of what all replicas use of the member together.

        A replica may always use its share, so that false reports of a replica or an engine cannot close the member.
        """
        return whole / (self.load.replicas + 1)

    def busy(self, at_s: float) -> None:
        """Record that others had prefills at the member at ``at_s``."""
        self.busy_s = max(at_s, self.busy_s)


class MemberLoad:
    """The load of one member.

    All loads of a pool share ``agreement``, ``fetches``, ``outdated`` and ``redispatch``. A changed load adds itself to
    ``outdated``. A changed load also adds itself to ``redispatch`` if the member has queued requests. Both dicts keep
    the order of the changes.
    """

    def __init__(
        self,
        prior_tokens_per_second: float,
        agreement: Agreement,
        fetches: FetchSpeed,
        outdated: "dict[MemberLoad, None]",
        redispatch: "dict[MemberLoad, None]",
    ) -> None:
        self.prefills = PrefillAccount()
        self.kv = KvAccount()
        self.suspension = Suspension()
        self.queue = MemberQueue(self._changed)
        self.others = ReplicasLoad()
        self.summary = LoadSummary()
        self.in_flight = 0
        """The requests that were sent to the member and have no observed end, including silent requests."""
        # The time of all prefills that were sent to the member, at the speed of the specification.
        self._work_s = 0.0
        # The KV tokens of the others' requests at the engine's last report.
        self._measured_others = 0
        self._fetches = fetches
        self._outdated = outdated
        outdated[self] = None
        self._redispatch = redispatch
        # The time of the next overdue event; NaN if it must be recomputed.
        self._overdue_s = nan
        # The time at which the backlog reaches the dispatch window, and the window of that computation (NaN: not
        # computed).
        self._opens_s = inf
        self._opens_window_s = nan
        self.speed = LearntSpeed(prior_tokens_per_second, agreement, self._changed)

    @property
    def working(self) -> int:
        """The number of requests in flight without silent requests."""
        return len(self.prefills.pending) + len(self.kv.decoding)

    def set_prior(self, tokens_per_second: float, agreement: Agreement) -> None:
        """Set another prior of the prefill speed and reset the learnt speed."""
        self.speed = LearntSpeed(tokens_per_second, agreement, self._changed)
        self._changed()

    def others_changed(self, sum_loads: Callable[[], OthersLoad]) -> None:
        """Record that the load of others changed; ``sum_loads`` computes the new load."""
        self.others.changed(sum_loads)
        self._changed()

    def enter(self, now: float, request: InFlightRequest) -> None:
        """Count a request that was sent to this member."""
        if not request.prefilled_elsewhere:
            self._work_s += self.speed.prior.compute_s(request.new_tokens, request.matched_tokens)
        self.kv.add(request)
        if request.prefilled or request.prefilled_elsewhere:
            self.kv.decode(now, request)
        else:
            request.stage = Stage.PENDING
            # Prefills of others that were sent earlier run first.
            self.prefills.add(request, now + self.others.load.backlog_s)
        self.in_flight += 1
        self._changed()

    def first_token(self, now: float, request: InFlightRequest) -> None:
        """Record that a prefill ended at ``now``, and learn the speed from it."""
        prefills = self.prefills
        if request.prefilled_elsewhere:
            request.prefilled = True
            return
        # A prefill that overtook earlier prefills (chunked prefill, short before long) is not a sample of the speed.
        in_order, busy_s = prefills.head is request, now - prefills.busy_since_s(request)
        if request.stage is Stage.PENDING:
            # Engines usually serve prefills in order of arrival, so all earlier prefills have ended without a report.
            # If the engine's scheduler ran this prefill first, the earlier prefills count as ended too early. First
            # tokens of these earlier prefills may still arrive, but are not samples of the speed.
            while (passed := prefills.head) is not None and passed is not request:
                self._end_prefill(now, passed)
            self._end_prefill(now, request)
        request.prefilled = True
        # Assume that the others' prefills run evenly between this replica's remaining prefills.
        others_s = self.others.load.backlog_s
        prefills.restart(now + others_s / (len(prefills.pending) + 1))
        # A prefill that may have waited for a prefill of others is also not a sample of the speed.
        if in_order and request.streamed and request.alone and not others_s:
            self._learn(now, request, busy_s)
        self._changed()

    def _learn(self, now: float, request: InFlightRequest, busy_s: float) -> None:
        """Learn from an undisturbed prefill that took ``busy_s``.

        If the member could fetch tokens, either the speed of the fetch or of the prefill learns from it: the one with
        the larger part of the expected time. The other part is assumed to have taken its expected time.
        """
        reused_tokens = max(request.matched_tokens, request.stored_tokens)
        new_tokens, service_s = request.chain.tokens - reused_tokens, busy_s
        fetchable_tokens = reused_tokens - request.matched_tokens
        if fetchable_tokens:
            fetch_s = fetchable_tokens * self._fetches.token_s
            compute_s = self.speed.current.compute_s(new_tokens, reused_tokens)
            if fetch_s >= compute_s:
                self._fetches.observe(now, request.client, tokens=fetchable_tokens, seconds=busy_s - compute_s)
                return
            service_s -= fetch_s
        request.lesson = self.speed.observe(
            now,
            client=request.client,
            new_tokens=new_tokens,
            cached_tokens=reused_tokens,
            service_s=service_s,
            solo=self.others.busy_s < now - busy_s,
        )

    def await_answer(self, now: float, request: InFlightRequest) -> None:
        """Record the prefills that a request's whole answer will wait for, just before the request enters."""
        speed = self.speed
        # The head's progress counts, but not a stall.
        pending_s = self.prefills.backlog_s(now, inf) * speed.prior.linear_s / speed.current.linear_s
        request.answer = AwaitedAnswer(speed, before_s=self._work_s - pending_s)
        speed.await_answer()

    def end_answer(self, now: float, request: InFlightRequest) -> EndedAnswer | None:
        """Return what a request that ends now without an error shows of the member; None if nothing."""
        if request.answer is None or self.others.load.backlog_s:
            return None
        taught, before_s = request.answer
        return EndedAnswer(taught, work_s=self._work_s - before_s, seconds=now - request.dispatched_s)

    def give_up_answer(self, request: InFlightRequest) -> None:
        """Record that the router will not learn from a request's answer."""
        if request.answer is not None:
            request.answer.taught.await_answer_no_more()
            request.answer = None

    def retract(self, lesson: Lesson) -> None:
        """Take back what was learnt from a prefill."""
        # A pool with another prior may have replaced the speed that learnt it.
        lesson.learnt_by.retract(lesson)
        self._changed()

    def heard(self, now: float, request: InFlightRequest) -> None:
        """Record a report of a request; a silent request counts as decoding again."""
        if request.stage is Stage.PENDING:
            return
        if request.stage is Stage.SILENT:
            self.kv.add(request)
        self.kv.decode(now, request)
        self._changed()

    def leave(self, now: float, request: InFlightRequest) -> None:
        """Remove an ended request and its pending prefill."""
        if request.stage is Stage.PENDING:
            was_head = self.prefills.head is request
            self.prefills.remove(request)
            if was_head:
                self.prefills.restart(now)
        self.give_up_answer(request)
        self.kv.remove(request)
        self.in_flight -= 1
        self._changed()

    def measured(self, used_tokens: int | None) -> None:
        """Take an engine's report of the KV tokens that its requests use, None if it reports no number."""
        self.kv.measured(used_tokens, self.prefills.pending.values())
        self._measured_others = self.others.load.active_kv_tokens

    def update(self, now: float, decode_stall_s: float) -> LoadSummary:
        """Return the summary; update it first if it is no longer valid."""
        if now >= self.summary.until_s:
            self.end_overdue(now)
            self._summarize(now, decode_stall_s)
        return self.summary

    def end_overdue(self, now: float) -> None:
        """End the prefills and requests that count as ended at ``now`` without a report.

        The prefill of a response without streaming ends at its expected time. A prefill at the head and a decoding
        request count as ended after a long time without reports. If the member is stalled instead, the time without a
        completed prefill still counts (``PrefillAccount.backlog_s``) while another prefill is pending.
        """
        if self._overdue_s > now:  # The usual case; False for NaN.
            return
        while (overdue_s := self._next_overdue_s()) <= now:
            head = self.prefills.head
            if head is None or self.prefills.overdue_s() > overdue_s:
                self.give_up_answer(self.kv.most_silent)
                self.kv.give_up(self.kv.most_silent)
                self._changed()
            elif head.streamed:
                self.prefills.give_up_head(overdue_s)
                self.kv.decode(overdue_s, head)
                self._changed()
            else:
                self.first_token(overdue_s, head)

    def is_overdue(self, now: float) -> bool:
        """Return whether ``end_overdue`` would end anything."""
        return self._next_overdue_s() <= now

    def keep(self) -> Callable[[], None]:
        """Return a function that takes back what ``end_overdue`` ends from now on."""
        accounts = self.prefills.keep(), self.kv.keep()
        requests = [
            (each, each.stage, each.silent_since_s, each.prefilled)
            for each in (*self.prefills.pending.values(), *self.kv.decoding.values())
        ]

        def restore() -> None:
            for restore_account in accounts:
                restore_account()
            for each, stage, silent_since_s, prefilled in requests:
                each.stage, each.silent_since_s, each.prefilled = stage, silent_since_s, prefilled
            self._changed()

        return restore

    def backlog_s(self, now: float, decode_stall_s: float) -> float:
        """Return the seconds of prefill that all replicas and other sources have sent, without an observed end."""
        return self.prefills.backlog_s(now, decode_stall_s) + self.others.load.backlog_s

    def within_share(self, now: float, decode_stall_s: float, window_s: float) -> bool:
        """Return whether the backlog of this replica alone is within its share of the dispatch window."""
        return self.prefills.backlog_s(now, decode_stall_s) <= self.others.share(window_s)

    def queue_s(self, now: float, decode_stall_s: float) -> float:
        """Return T_q (paper eq. 7): the seconds until a new request's prefill would start at this member."""
        return self.backlog_s(now, decode_stall_s) + self.queue.ahead_s + self.others.load.held_s

    def ends_s(self, now: float, decode_stall_s: float) -> float:
        """Return the seconds until all prefills that are now pending or queued have ended."""
        return self.backlog_s(now, decode_stall_s) + self.queue.compute_s + self.others.load.held_s

    def dispatches_s(self, window_s: float, *, after_s: float, share_after_s: float) -> float | None:
        """Return the next time at which a queued request may be dispatched without an event; None if it needs an event.

        The returned time is the first time after ``after_s`` at which the backlog reaches ``window_s``, a report is
        overdue, or the oldest queued request may use this replica's share.
        """
        if self._opens_window_s != window_s:
            self._opens_s = self.prefills.reaches_s(window_s - self.others.load.backlog_s)
            self._opens_window_s = window_s
        times_s = (self._opens_s, self._next_overdue_s(), self._share_opens_s(window_s, share_after_s))
        return min((each for each in times_s if after_s < each < inf), default=None)

    def count_distinct(self) -> DistinctBlocks:
        """Count the distinct blocks of the requests in flight from now on, and return them."""
        return self.kv.count_distinct(self.prefills.pending.values())

    @property
    def in_flight_kv_tokens(self) -> float:
        """The KV tokens of all prompts in flight, also of others.

        Of the prompts in full and the engine's report, the smaller number counts: only the report knows what prompts
        share, and only the prompts show at once that a request has ended.
        """
        others = self.others.load
        later = others.pending_prefill_tokens + max(0, others.active_kv_tokens - self._measured_others)
        return min(self.kv.tokens + others.active_kv_tokens, self.kv.used_tokens + later)

    def has_room(self, prompt_tokens: int, kv_tokens: int, *, output_tokens: float) -> bool:
        """Return whether a prompt and its expected output fit into the free KV memory; True without other requests."""
        requests = self.working + self.others.load.in_flight
        tokens = self.in_flight_kv_tokens + prompt_tokens + (requests + 1) * output_tokens
        return requests == 0 or tokens <= kv_tokens

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
        others_s = others.backlog_s + queue.ahead_s + others.held_s
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
