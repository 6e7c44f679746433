"""One pool's router: a synchronous, sans-IO object that turns requests into decisions.

Inputs and ``now`` (monotonic seconds) go in, values come out; ``next_deadline`` tells the driver when to call
``on_deadline``, and ``take_outcomes`` what became of requests that were held. The gRPC server drives it with the event
loop's clock, the simulator with a heap. It composes the rooms of a request's walk (docs/architecture.md): hotness gives
the key, the rings the pair, the fleet what each candidate holds, owes and would take, the policy the choice; a request
that its instance has no room for yet waits here.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cache

from dualmap.chooser import Chooser
from dualmap.fleet.entry import Entry
from dualmap.fleet.fleet import Fleet
from dualmap.fleet.load import MemberLoad
from dualmap.policies.situation import Candidate, Situation
from dualmap.pools.pool import Pool
from dualmap.queue.dispatch import Openings
from dualmap.queue.held import HeldRequests, Waiting
from dualmap.queue.rebalance import REBALANCED, relieve
from dualmap.receipt import Key
from dualmap.replicas.news import News, Placement, SharedBinding
from dualmap.replicas.peers import PEER_TTL_S
from dualmap.requests import Completion, Decision, FirstToken, Held, PoolStatus, Reason, Refusal, Request, Usage


class PoolRouter:
    """Routes the requests of one pool and keeps the books about its members.

    ``shares`` has it keep for ``take_news`` what other replicas want to know.
    """

    def __init__(self, pool: Pool, *, shares: bool = False) -> None:
        self._pool = pool
        self._fleet = Fleet(pool)
        self._chooser = Chooser(pool, self._fleet, shares=shares)
        self._held = HeldRequests()
        # The loads of the members for which requests are held.
        self._holding: dict[str, MemberLoad] = {}
        self._openings, self._pumped_s = Openings(self._fleet.ledger.reopening), -1.0
        self._outcomes: list[Decision | Refusal] = []
        self._shares = shares
        self._placements: list[Placement] = []
        self._bodiless_sequence = 0

    @property
    def pool(self) -> Pool:
        """The pool as last given."""
        return self._pool

    def on_request(self, now: float, request: Request) -> Decision | Held | Refusal:
        """Choose the instance of a request and book it there; hold it while that has enough to do; or refuse it.

        A held request's decision or refusal comes by ``take_outcomes``, unless it is aborted before.
        """
        self._fleet.resume(now)
        return self._place(now, request, None)

    def take_outcomes(self) -> tuple[Decision | Refusal, ...]:
        """Return what became of held requests since the last call; to be called after every event."""
        if not self._outcomes:
            return ()
        outcomes, self._outcomes = tuple(self._outcomes), []
        return outcomes

    def any_endpoints(self, subset: frozenset[str] | None) -> tuple[str, ...]:
        """Return up to two endpoints for a request without a prompt, in turn; empty when no member is eligible."""
        members = self._fleet.membership.ring(subset).members
        turn = self._bodiless_sequence
        self._bodiless_sequence += 1
        return tuple(members[(turn + step) % len(members)].endpoint for step in range(min(2, len(members))))

    def on_served(self, now: float, request_id: str, endpoint: str) -> bool:
        """Move a request's books to the member that really served it; return whether that was another than chosen."""
        entry = self._fleet.ledger.entry(request_id)
        if entry is None:
            return False
        chosen, served = self._fleet.membership.members.get(entry.member), self._fleet.membership.at(endpoint)
        if served is None or served is chosen:
            return False
        left, dispatched_s = entry.member, entry.dispatched_s
        self._fleet.take_back(left, entry.chain, entry.matched_tokens)
        candidate = self._fleet.view(now, entry.chain).candidate(served.id)
        self._fleet.ledger.move(
            now, entry, to=served.id, matched_tokens=candidate.matched_tokens, compute_s=candidate.compute_s
        )
        self._fleet.will_hold(served.id, entry.chain)
        self._chooser.bind(now, entry)
        # Envoy goes to another only when it could not speak to the chosen one.
        self._on_failure(now, left, dispatched_s)
        self._pump(now, left)
        return True

    def on_first_token(self, now: float, request_id: str) -> FirstToken | None:
        """Release a request's pending prefill; None when it is unknown or was released before."""
        entry = self._fleet.ledger.first_token(now, request_id)
        if entry is None:
            return None
        # Now it is certain, and used now; it may even have been forgotten for a request that was broken off.
        self._fleet.will_hold(entry.member, entry.chain)
        self._fleet.succeeded(now, entry.member)
        self._pump(now, entry.member)
        ttft_s, expected_s = now - entry.arrived_s, entry.predicted_ttft_s
        within_slo = ttft_s <= self._pool.slo.ttft_s
        return FirstToken(member=entry.member, ttft_s=ttft_s, predicted_ttft_s=expected_s, within_slo=within_slo)

    def on_finished(self, now: float, request_id: str, usage: Usage | None = None) -> Completion | None:
        """Close the books on a request that ended, with the engine's token counts where known; None when unknown."""
        entry = self._fleet.ledger.finish(now, request_id)
        if entry is None:
            return None
        self._fleet.succeeded(now, entry.member)
        if usage is not None and usage.completion_tokens is not None:
            self._fleet.generated(usage.completion_tokens)
        self._pump(now, entry.member)
        return entry.completion(usage)

    def on_aborted(self, now: float, request_id: str) -> Completion | None:
        """Close the books on a request whose client went away; None when it is unknown, has ended or was held."""
        if self._drop_held(now, request_id):
            return None
        entry = self._fleet.ledger.leave(now, request_id)
        return None if entry is None else self._broken_off(now, entry)

    def on_failed(self, now: float, request_id: str) -> Completion | None:
        """Close the books on a request that its instance failed; several in a row suspend that instance."""
        entry = self._fleet.ledger.leave(now, request_id)
        if entry is None:
            return None
        self._on_failure(now, entry.member, entry.dispatched_s)
        return self._broken_off(now, entry)

    def on_heard(self, now: float, request_id: str) -> None:
        """Take note that a request is alive, so that it does not expire; nothing happens when it is unknown."""
        self._fleet.ledger.heard(now, request_id)

    def on_pool(self, now: float, pool: Pool) -> None:
        """Take a new version of the pool: members come, change and go; live requests stay in the books."""
        assert pool.id == self._pool.id, f"router of {self._pool.id} was given {pool.id}"
        self._pool = pool
        self._chooser.adopt(pool)
        stayed = self._fleet.adopt(now, pool)
        self._replace_held(now, stayed)
        self._fleet.ledger.retain(set(self._fleet.membership.members))
        self._pump_all(now)

    def take_news(self, now: float) -> News:
        """Return what other replicas want to know and have not been told."""
        placements, self._placements = tuple(self._placements), []
        return News(
            hotness=self._chooser.tree.take_counts(),
            loads=self._fleet.shares(now),
            placements=placements,
            bindings=self._chooser.sessions.take_changes(now),
            wanted=self._chooser.sessions.take_wanted(),
        )

    def on_news(self, now: float, peer: str, news: News, age_s: float) -> None:
        """Take what another replica told ``age_s`` ago."""
        said_s = now - age_s
        if news.loads is not None and age_s < PEER_TTL_S:
            self._fleet.hear(said_s, peer, news.loads)
        self._chooser.tree.merge(said_s, news.hotness)
        for placement in news.placements:
            self._fleet.placed_elsewhere(placement)
        for binding in news.bindings:
            self._chooser.sessions.adopt(said_s, binding, hinted=False)
        self._pump_all(now)

    def on_bindings(self, now: float, bindings: Sequence[SharedBinding]) -> None:
        """Take what the store says of sessions: the better claim to one, or what was wanted."""
        for binding in bindings:
            self._chooser.sessions.adopt(now, binding, hinted=True)

    def next_deadline(self) -> float | None:
        """Return when ``on_deadline`` wants to be called next, or None."""
        deadlines = [self._fleet.ledger.next_expiry(), self._fleet.peers.next_expiry(), self._fleet.resume_s]
        if self._held:
            queue = self._pool.routing.queue
            deadlines.append(self._openings.first_s(queue.dispatch_window_s, after_s=self._pumped_s))
            deadlines.append(self._held.next_expiry(queue.max_wait_s))
        return min((each for each in deadlines if each is not None), default=None)

    def on_deadline(self, now: float) -> tuple[Completion, ...]:
        """Do what is due: give up what waited or was silent for too long; return the requests that were silent."""
        expired = tuple(self._broken_off(now, entry) for entry in self._fleet.ledger.expire(now))
        self._fleet.expire_peers(now)
        self._fleet.resume(now)
        self._pump_all(now)
        for request_id in self._held.expired(now, self._pool.routing.queue.max_wait_s):
            refusal = self._refuse(now, request_id, Reason.NO_ENDPOINT)
            if waiting := self._held.placed(request_id):
                refusal = self._refuse(now, request_id, Reason.WAITED_TOO_LONG, waiting.member)
            # Unless the one given up before it left it room, and it went.
            if self._drop_held(now, request_id):
                self._outcomes.append(refusal)
        return expired

    def status(self) -> PoolStatus:
        """Return what this router knows of the pool at this moment."""
        return PoolStatus(
            pool=self._pool.id,
            ring_version=self._pool.ring_version,
            held=len(self._held),
            homeless_prefill_tokens=self._held.homeless_tokens,
            sessions=len(self._chooser.sessions),
            peers=len(self._fleet.peers),
            endpoints=self._fleet.statuses(),
            hotness_nodes=self._chooser.tree.nodes,
            split_prefixes=self._chooser.tree.split_prefixes,
        )

    def _place(self, now: float, request: Request, key: Key | None) -> Decision | Held | Refusal:
        """Find a request its instance; ``key`` is given when it had one before, so that it counts for hotness once."""
        ring = self._fleet.membership.ring(request.subset)
        if not ring.members:
            if self._pool.routing.queue.hold_when_empty and request.subset is None:
                return self._hold_homeless(now, request)
            return self._refuse(now, request.id, Reason.NO_ENDPOINT)
        key = key or self._chooser.key(now, request)
        situation = self._chooser.situation(now, request, key, ring)
        if self._relieve_pair(now, situation):
            situation = self._chooser.situation(now, request, key, ring)
        return self._admit(now, self._chooser.choose(now, request, key, situation))

    def _admit(self, now: float, placed: Waiting) -> Decision | Held | Refusal:
        """Hand a request that was placed over to its instance, or hold it, or refuse it where too many are held."""
        queue, member = self._pool.routing.queue, placed.member
        self._pump(now, member)
        if member not in self._holding and self._fleet.may_take(now, member, placed.request.chain.tokens):
            self._fleet.will_hold(member, placed.request.chain)
            return self._hand_over(now, placed)
        if placed.request.id not in self._held and len(self._held) >= queue.max_held:
            return self._refuse(now, placed.request.id, Reason.QUEUE_FULL, member)
        self._fleet.will_hold(member, placed.request.chain)
        self._hold(now, placed)
        self._pump(now, member)  # It may fit where the one whose turn it was does not.
        return Held(request_id=placed.request.id)

    def _relieve_pair(self, now: float, situation: Situation) -> int:
        """Run a round of rebalancing if both candidates of a request are overloaded; return how many moved."""
        slo_ttft_s = self._pool.slo.ttft_s
        if not self._holding or not self._chooser.rebalances:
            return 0
        if any(situation.waited_s + each.ttft_s <= slo_ttft_s for each in situation.pair):
            return 0
        queue_s = cache(lambda member: self._fleet.queue_s(now, member))
        return sum(
            relieve(
                now,
                self._holding[each.id].held,
                ahead_s=self._fleet.backlog_s(now, each.id),
                slo_ttft_s=slo_ttft_s,
                queue_s=queue_s,
                alternative=lambda waiting: self._chooser.alternative(now, waiting),
                move=lambda waiting, to: self._migrate(now, waiting, to),
            )
            for each in situation.pair
            if each.id in self._holding
        )

    def _migrate(self, now: float, waiting: Waiting, to: Candidate) -> None:
        """Move a held request to another member's queue, or hand it over there."""
        chain = waiting.request.chain
        self._unqueue(waiting)
        self._fleet.take_back(waiting.member, chain, waiting.matched_tokens)
        waited_s = now - waiting.request.arrived_s
        moved = replace(
            waiting,
            member=to.id,
            matched_tokens=to.matched_tokens,
            compute_s=to.compute_s,
            predicted_ttft_s=waited_s + to.ttft_s,
            receipt=waiting.receipt.moved(to, REBALANCED, predicted_ttft_s=waited_s + to.ttft_s),
            moved=True,
        )
        self._settle(self._admit(now, moved))

    def _replace_held(self, now: float, stayed: Collection[str]) -> None:
        """Find the held requests of members that have left or may not be used, and the homeless, a place again."""
        ring = self._fleet.membership.ring(None)
        usable = {each.id for each in ring.members if each.id in stayed}
        # All leave their queues before the first is placed: placing one may hand over others.
        leaving = [waiting for member, load in self._holding.items() if member not in usable for waiting in load.held]
        for waiting in leaving:
            self._unqueue(waiting)
            self._fleet.take_back(waiting.member, waiting.request.chain, waiting.matched_tokens)
        for waiting in leaving:
            self._settle(self._place(now, waiting.request, waiting.key))
        if ring.members or not self._pool.routing.queue.hold_when_empty:
            for request in list(self._held.homeless.values()):
                self._settle(self._place(now, request, None))

    def _settle(self, outcome: Decision | Held | Refusal) -> None:
        """Keep what became of a request that was held and has been placed again."""
        if isinstance(outcome, Refusal):
            self._held.release(outcome.request_id)
        if not isinstance(outcome, Held):
            self._outcomes.append(outcome)

    def _on_failure(self, now: float, member: str, dispatched_s: float) -> None:
        """Count a failure; once a member is suspended, what is held for it goes elsewhere."""
        self._fleet.failed(now, member, dispatched_s)
        if member in self._fleet.membership.suspended:
            self._replace_held(now, self._fleet.membership.members)

    def _broken_off(self, now: float, entry: Entry) -> Completion:
        """Report a request that nothing good came of."""
        if not entry.prefilled:
            # An engine that fails at once must not attract the next request by a cache it never filled.
            self._fleet.take_back(entry.member, entry.chain, entry.matched_tokens)
        self._pump(now, entry.member)
        return entry.completion(None)

    def _hand_over(self, now: float, waiting: Waiting) -> Decision:
        """Book a request at its instance."""
        request, chain = waiting.request, waiting.request.chain
        self._held.release(request.id)
        entry = Entry(
            request_id=request.id,
            member=waiting.member,
            chain=chain,
            matched_tokens=waiting.matched_tokens,
            arrived_s=request.arrived_s,
            dispatched_s=now,
            predicted_ttft_s=waiting.predicted_ttft_s,
            compute_s=waiting.compute_s,
            heard_s=now,
            streamed=request.streamed,
            session=request.session,
            alone=not self._fleet.ledger.load(waiting.member).peers.backlog_s,
        )
        self._fleet.ledger.enter(now, entry)
        self._chooser.bind(now, entry)
        endpoint = self._fleet.endpoint(waiting.member)
        assert endpoint is not None, "requests are placed at members"
        if self._shares and waiting.new_tokens >= chain.block_tokens:
            self._placements.append(Placement(endpoint=endpoint, hashes=chain.cacheable))
        # Envoy tries the other one of the pair when the chosen one refuses the connection.
        others = [self._fleet.endpoint(each) for each in waiting.pair if each != waiting.member]
        return Decision(
            request_id=request.id,
            endpoints=(endpoint, *[each for each in others if each is not None][:1]),
            receipt=waiting.receipt,
        )

    def _hold(self, now: float, waiting: Waiting) -> None:
        load = self._fleet.ledger.load(waiting.member)
        load.hold(waiting)
        self._holding[waiting.member] = load
        self._held.hold(now, waiting)

    def _hold_homeless(self, now: float, request: Request) -> Held | Refusal:
        if request.id not in self._held and len(self._held) >= self._pool.routing.queue.max_held:
            return self._refuse(now, request.id, Reason.NO_ENDPOINT)
        self._held.hold_homeless(now, request)
        return Held(request_id=request.id)

    def _refuse(self, now: float, request_id: str, reason: Reason, member: str | None = None) -> Refusal:
        return Refusal(request_id=request_id, reason=reason, retry_after_s=self._fleet.retry_after_s(now, member))

    def _unqueue(self, waiting: Waiting) -> None:
        """Take a request out of its instance's queue."""
        load = self._holding[waiting.member]
        load.unhold(waiting)
        if not load.held:
            del self._holding[waiting.member]

    def _drop_held(self, now: float, request_id: str) -> bool:
        """Forget a held request; False when it is none. Who waits behind it may fit where it did not."""
        waiting = self._held.placed(request_id)
        if waiting is not None:
            self._unqueue(waiting)
            self._fleet.take_back(waiting.member, waiting.request.chain, waiting.matched_tokens)
            self._pump(now, waiting.member)
        return self._held.release(request_id)

    def _pump(self, now: float, member: str) -> None:
        """Hand held requests over to a member for as long as its window is open."""
        load = self._holding.get(member)
        if load is None:
            return
        defers, within_s = self._chooser.defers, None
        while load.held and self._fleet.is_open(now, member):
            if defers:
                within_s = self._pool.slo.ttft_s - self._fleet.backlog_s(now, member)
            waiting = load.held.next(now, within_s=within_s, max_overtaken=self._pool.routing.queue.max_overtaken)
            if not self._fleet.has_room(member, waiting.request.chain.tokens):
                break
            load.take(waiting)
            self._outcomes.append(self._hand_over(now, waiting))
        if not load.held:
            del self._holding[member]

    def _pump_all(self, now: float) -> None:
        for member in tuple(self._holding):
            self._pump(now, member)
        self._pumped_s = now
