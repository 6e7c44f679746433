"""Sends requests to their members, and queues requests while their member is saturated.

The router calls one method per event. Each of these methods returns the decisions of released requests and the
rejections of expired requests.
"""

from collections.abc import Collection
from dataclasses import replace
from functools import cache, partial

from dualmap.chooser import Chooser, best_of
from dualmap.fleet.fleet import Fleet
from dualmap.keys.rings import DualRing
from dualmap.policies.situation import Candidate, Situation
from dualmap.pools.pool import Pool
from dualmap.queue.rebalance import REBALANCED, relieve
from dualmap.queue.request_queue import QueuedRequest, RequestQueue
from dualmap.receipt import Key
from dualmap.replicas.update import Placement
from dualmap.requests import Decision, Effects, Outcome, Queued, Reason, Rejection, Request, ShadowStatus
from dualmap.shadows import Comparison, Shadows


class Dispatcher:
    """Sends one pool's requests to their members, and queues requests while their member is saturated.

    If ``replicated`` is true, the dispatcher stores the placement of each prompt for other replicas
    (``take_placements``).
    """

    def __init__(self, pool: Pool, fleet: Fleet, chooser: Chooser, *, replicated: bool) -> None:
        self._pool = pool
        self._fleet = fleet
        self._candidates = fleet.candidates
        self._capacity = fleet.capacity
        self._chooser = chooser
        self._shadows = Shadows(pool, chooser, fleet)
        self._replicated = replicated
        self._placements: list[Placement] = []
        self._queue = RequestQueue(fleet.capacity.queue, fleet.shares)
        # The time of the last `release_all`. A member with an earlier dispatch time is stalled and cannot take
        # requests.
        self._released_s = -1.0

    @property
    def queued(self) -> int:
        """The number of queued requests, including requests without a member."""
        return len(self._queue)

    @property
    def unplaced_tokens(self) -> int:
        """The prompt tokens of the requests that wait because the pool has no member."""
        return self._queue.unplaced_tokens

    @property
    def shadows(self) -> tuple[ShadowStatus, ...]:
        """The comparison of policies; empty without shadow policies."""
        return self._shadows.status()

    def is_queued(self, request_id: str) -> bool:
        """Return whether a request is queued."""
        return request_id in self._queue

    def adopt(self, pool: Pool) -> None:
        """Store a new version of the pool; ``requeue`` and ``release_all`` apply it to queued requests."""
        self._pool = pool
        self._shadows.adopt(pool)

    def place(self, now: float, request: Request) -> Effects[Decision | Queued | Rejection]:
        """Send a new request to its member, queue the request, or reject the request."""
        outcomes: list[Outcome] = []
        self._place(now, request, None, outcomes)
        if len(outcomes) == 1 and outcomes[0].request_id == request.id:
            return Effects(outcomes[0])
        own = [each for each in outcomes if each.request_id == request.id]
        others = tuple([each for each in outcomes if each.request_id != request.id])
        return Effects(own[0] if own else Queued(request_id=request.id), others)

    def release(self, now: float, member: str) -> tuple[Outcome, ...]:
        """Dispatch a member's queued requests until the member is saturated."""
        if member not in self._queue.queues:
            return ()
        outcomes: list[Outcome] = []
        self._release(now, member, outcomes)
        return tuple(outcomes)

    def release_all(self, now: float) -> tuple[Outcome, ...]:
        """Dispatch every member's queued requests until the member is saturated."""
        outcomes: list[Outcome] = []
        for member in tuple(self._queue.queues):
            self._release(now, member, outcomes)
        self._released_s = now
        return tuple(outcomes)

    def requeue(self, now: float, stayed: Collection[str]) -> tuple[Outcome, ...]:
        """Choose new members for queued requests without a usable member.

        A member is usable if it may be picked for the request and is in ``stayed``. Unplaced requests, which have no
        member, also get a member.
        """
        outcomes: list[Outcome] = []
        ring = self._candidates.ring(None)
        usable = {each.id for each in ring.members if each.id in stayed}
        # Remove all these requests before the first is placed: each placement may dispatch other queued requests.
        leaving = [
            queued
            for member, queue in self._queue.queues.items()
            for queued in queue
            if member not in usable or member not in self._candidates.rings(queued.request)[0].ids
        ]
        for queued in leaving:
            self._withdraw(queued)
        for queued in leaving:
            self._place(now, queued.request, queued.key, outcomes)
        if ring.members or not self._pool.routing.queue.hold_when_empty:
            for request in self._queue.unplaced():
                self._place(now, request, None, outcomes)
        return tuple(outcomes)

    def forget(self, now: float, request_id: str) -> Effects[bool]:
        """Remove an aborted request from the queue; the answer is whether the request was queued."""
        outcomes: list[Outcome] = []
        queued = self._queue.placed(request_id)
        if queued is not None:
            self._remove(now, queued, outcomes)
        return Effects(self._queue.forget(request_id), tuple(outcomes))

    def expire(self, now: float) -> tuple[Outcome, ...]:
        """Reject requests that have waited longer than the limit."""
        outcomes: list[Outcome] = []
        for request_id in self._queue.expired(now, self._pool.routing.queue.max_wait_s):
            if request_id not in self._queue:
                # An earlier rejection in this loop has released this request.
                continue
            queued = self._queue.placed(request_id)
            if queued is None:
                rejection = self._rejection(now, request_id, Reason.NO_ENDPOINT)
            else:
                rejection = self._rejection(now, request_id, Reason.WAITED_TOO_LONG, queued.member)
                self._remove(now, queued, outcomes)
            self._queue.forget(request_id)
            outcomes.append(rejection)
        return tuple(outcomes)

    def overdue(self, request: Request) -> Rejection:
        """Return the rejection of a request that several routers, one after the other, queued for the longest wait."""
        return Rejection(
            request_id=request.id,
            reason=Reason.WAITED_TOO_LONG if self._candidates.rings(request)[0].members else Reason.NO_ENDPOINT,
            retry_after_s=self._pool.routing.queue.max_wait_s,
        )

    def next_deadline(self) -> float | None:
        """Return the next time at which ``release_all`` or ``expire`` must run, or None."""
        if not self._queue:
            return None
        opens_s = self._capacity.next_dispatch_s(after_s=self._released_s)
        expires_s = self._queue.next_expiry(self._pool.routing.queue.max_wait_s)
        return min((each for each in (opens_s, expires_s) if each is not None), default=None)

    def take_placements(self) -> tuple[Placement, ...]:
        """Return the placements of prompts since the last call."""
        placements, self._placements = tuple(self._placements), []
        return placements

    def _place(self, now: float, request: Request, key: Key | None, outcomes: list[Outcome]) -> None:
        """Choose a member for a request.

        ``key`` is the key of an earlier placement, so that hotness and shadow policies count the request only once.
        """
        ring, preferred = self._candidates.rings(request)
        if not ring.members:
            self._place_nowhere(now, request, outcomes)
            return
        comparison = self._shadows.new_comparison(request) if key is None else None
        key = key or self._chooser.key(now, request)
        if preferred is None:
            placed = self._choose(now, request, key, comparison, outcomes, ring)
        else:
            choose = partial(self._choose, now, request, key, comparison, outcomes)
            placed = best_of(ring, preferred, choose, slo_ttft_s=self._pool.slo.ttft_s)
        leaving = self._candidates.leaving(now, request)
        if leaving:
            leaving = self._open(now, request, leaving)
        if leaving:
            answer_s = self._fleet.answers.expected_s()
            placed = self._chooser.last_turn(now, placed, leaving, answer_s=answer_s) or placed
        if comparison is not None:
            self._shadows.compare(now, comparison, placed, ring, preferred, leaving)
        self._admit(now, placed, outcomes)

    def _choose(
        self,
        now: float,
        request: Request,
        key: Key,
        comparison: Comparison | None,
        outcomes: list[Outcome],
        ring: DualRing,
    ) -> QueuedRequest:
        """Choose a member of a ring for a request; first relieve the queues of an overloaded pair."""
        situation = self._chooser.situation(now, request, key, ring)
        if self._relieve_pair(now, situation, outcomes):
            situation = self._chooser.situation(now, request, key, ring)
            if comparison is not None:
                comparison.situations.clear()
        if comparison is not None:
            comparison.situations[ring, key] = situation
        return self._chooser.choose(request, key, situation)

    def _open(
        self, now: float, request: Request, leaving: tuple[tuple[str, float], ...]
    ) -> tuple[tuple[str, float], ...]:
        """Return those of some members that can take a request now, because none queues for a member that leaves."""
        return tuple(
            (member, left_s)
            for member, left_s in leaving
            if not self._queue.queues.get(member) and self._may_take(now, member, request)
        )

    def _place_nowhere(self, now: float, request: Request, outcomes: list[Outcome]) -> None:
        queue = self._pool.routing.queue
        if not queue.hold_when_empty or request.subset is not None:
            self._queue.forget(request.id)
            outcomes.append(self._rejection(now, request.id, Reason.NO_ENDPOINT))
        elif self._has_place(now, request, outcomes):
            self._queue.enqueue_unplaced(now, request)
        else:
            outcomes.append(self._reject_new(now, request, Reason.NO_ENDPOINT))

    def _admit(self, now: float, placed: QueuedRequest, outcomes: list[Outcome]) -> None:
        """Dispatch a placed request, queue the request, or reject the request if the queue is full."""
        request, member = placed.request, placed.member
        queue = self._queue.queues.get(member)
        if queue:
            self._release(now, member, outcomes)
        if not queue and self._may_take(now, member, request):
            self._fleet.will_cache(now, placed)
            outcomes.append(self._dispatch(now, placed))
        elif not self._has_place(now, request, outcomes):
            outcomes.append(self._reject_new(now, request, Reason.QUEUE_FULL, member))
        else:
            self._fleet.will_cache(now, placed)
            self._queue.enqueue(now, placed)
            # The new request may fit into the member's memory even if earlier requests do not.
            self._release(now, member, outcomes)

    def _has_place(self, now: float, request: Request, outcomes: list[Outcome]) -> bool:
        """Return whether the queue has a place for a request, or makes one by rejecting another request."""
        if request.id in self._queue or len(self._queue) < self._pool.routing.queue.max_held:
            return True
        excess = self._queue.excess(request)
        if excess is None:
            return False
        limited = excess.client != request.client
        queued = self._queue.placed(excess.id)
        if queued is None:
            rejection = self._rejection(now, excess.id, Reason.NO_ENDPOINT, limited=limited)
        else:
            rejection = self._rejection(now, excess.id, Reason.QUEUE_FULL, queued.member, limited=limited)
            self._withdraw(queued)
        self._queue.forget(excess.id)
        outcomes.append(rejection)
        if queued is not None:
            # Later requests in the queue may fit into the member's memory even if this request did not.
            self._release(now, queued.member, outcomes)
        return True

    def _reject_new(self, now: float, request: Request, reason: Reason, member: str | None = None) -> Rejection:
        """Return the rejection of an arriving request for which a full queue has no place."""
        return self._rejection(now, request.id, reason, member, limited=self._fleet.shares.has_rivals(request.client))

    def _may_take(self, now: float, member: str, request: Request) -> bool:
        waited_s = now - request.arrived_s
        tokens = request.chain.tokens
        return self._capacity.is_open(now, member, waited_s=waited_s) and self._capacity.has_room(
            member, tokens, waited_s=waited_s
        )

    def _release(self, now: float, member: str, outcomes: list[Outcome]) -> None:
        """Dispatch queued requests while the member's backlog is within the window and they fit into its memory."""
        queue = self._queue.queues.get(member)
        if queue is None:
            return
        defers = self._chooser.defers
        while queue and self._capacity.is_open(now, member, waited_s=(waited_s := now - queue.oldest_arrived_s)):
            within_s = self._pool.slo.ttft_s - self._capacity.backlog_s(now, member) if defers else None
            queued = queue.next(
                now,
                within_s=within_s,
                max_overtaken=self._pool.routing.queue.max_overtaken,
                counter=self._fleet.shares.counter,
            )
            if not self._capacity.has_room(member, queued.request.chain.tokens, waited_s=waited_s):
                break
            self._queue.take(queued)
            outcomes.append(self._dispatch(now, self._fleet.renewed(now, queued)))

    def _dispatch(self, now: float, queued: QueuedRequest) -> Decision:
        """Record that a request is sent to its member; return its decision."""
        chain, pair = queued.request.chain, queued.pair
        self._queue.forget(queued.request.id)
        self._chooser.bind(now, self._fleet.dispatched(now, queued))
        endpoint = self._candidates.endpoint(queued.member)
        assert endpoint is not None, "requests are placed at members"
        if self._replicated and chain.cacheable:
            # A prompt that adds no blocks is also a placement. Otherwise, each router's index would evict other blocks.
            self._placements.append(Placement(endpoint=endpoint, hashes=chain.cacheable))
        endpoints: tuple[str, ...] = (endpoint,)
        for other in pair:
            if other != queued.member and (fallback := self._candidates.endpoint(other)) is not None:
                # Envoy tries the other member of the pair if the chosen member refuses the connection.
                endpoints = endpoint, fallback
                break
        return Decision(request_id=queued.request.id, endpoints=endpoints, receipt=queued.receipt)

    def _rejection(
        self, now: float, request_id: str, reason: Reason, member: str | None = None, *, limited: bool = False
    ) -> Rejection:
        retry_after_s = self._retry_after_s(now, member)
        return Rejection(request_id=request_id, reason=reason, retry_after_s=retry_after_s, limited=limited)

    def _retry_after_s(self, now: float, member: str | None) -> float | None:
        """Return the recommended time before a retry of a rejected request; None if unknown.

        By that time, the requests that are now queued for ``member`` are served or rejected. If the pool has no member,
        a new member may have started by that time.
        """
        max_wait_s = self._pool.routing.queue.max_wait_s
        if member is not None:
            return min(self._capacity.ends_s(now, member), max_wait_s)
        return None if self._candidates.size else max_wait_s

    def _remove(self, now: float, queued: QueuedRequest, outcomes: list[Outcome]) -> None:
        """Remove a request without a decision from its member's queue; dispatch later requests that may go now."""
        self._withdraw(queued)
        # Later requests in the queue may fit into the member's memory even if this request did not.
        self._release(now, queued.member, outcomes)

    def _withdraw(self, queued: QueuedRequest) -> None:
        """Remove a request from its member's queue, and its blocks from the member's index."""
        self._queue.withdraw(queued)
        self._fleet.will_not_cache(queued)

    def _relieve_pair(self, now: float, situation: Situation, outcomes: list[Outcome]) -> int:
        """Rebalance once if both candidates of a request are overloaded; return the number of moved requests."""
        slo_ttft_s = self._pool.slo.ttft_s
        if not self._queue.queues or not self._chooser.rebalances:
            return 0
        if any(situation.waited_s + each.ttft_s <= slo_ttft_s for each in situation.pair):
            return 0
        queue_s = cache(lambda member: self._capacity.queue_s(now, member))
        return sum(
            relieve(
                now,
                queue,
                ahead_s=self._capacity.backlog_s(now, each.id),
                slo_ttft_s=slo_ttft_s,
                queue_s=queue_s,
                alternative=lambda queued: self._chooser.alternative(now, queued),
                move=lambda queued, to: self._move(now, queued, to, outcomes),
                counter=self._fleet.shares.counter,
            )
            for each in situation.pair
            if (queue := self._queue.queues.get(each.id)) is not None
        )

    def _move(self, now: float, queued: QueuedRequest, to: Candidate, outcomes: list[Outcome]) -> None:
        """Move a queued request to another member: dispatch it there, or queue it there."""
        self._withdraw(queued)
        predicted_ttft_s = now - queued.request.arrived_s + to.ttft_s
        receipt = queued.receipt.moved(
            to,
            REBALANCED,
            predicted_ttft_s=predicted_ttft_s,
            adapter=self._candidates.adapter_state(queued.request.adapter, to.id),
        )
        self._admit(now, replace(queued.at(to, receipt), moved=True), outcomes)
