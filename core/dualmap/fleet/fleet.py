"""A pool's members in this router: each member's cache, load, free memory and speed.

The router reports events to ``Fleet``. The chooser and the dispatcher read ``Fleet.candidates`` (the members that may
be picked) and ``Fleet.capacity`` (whether a member takes another request). Only this package uses other components.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from dualmap.engines.profile import EngineProfile
from dualmap.engines.profiles import Profiles
from dualmap.engines.prompt_tokens import PromptTokens
from dualmap.engines.residency import KvChange
from dualmap.engines.source import SourceState, SourceStatus
from dualmap.fleet.answers import AnswerTimes
from dualmap.fleet.caches import Caches
from dualmap.fleet.candidates import Candidates
from dualmap.fleet.capacity import Capacity
from dualmap.fleet.fetches import Prefill
from dualmap.fleet.in_flight import InFlightRequest
from dualmap.fleet.ledger import Ledger
from dualmap.fleet.memory_waits import MemoryWaits
from dualmap.fleet.others import Others
from dualmap.fleet.reported import ReportedCaches
from dualmap.fleet.usage import Origin
from dualmap.keys.membership import Membership
from dualmap.kv_store.view import StoreMatch
from dualmap.pools.pool import Member, MemberState, Pool
from dualmap.prompts.blocks import PUBLIC_KEY
from dualmap.queue.fair_shares import FairShares
from dualmap.queue.request_queue import QueuedRequest
from dualmap.replicas.update import Placement, SharedLoad
from dualmap.requests import EndpointStatus, EventsStatus, Request, SentRequest, Usage

# A report of an earlier process of an engine contains another start time, apart from rounding.
_SAME_START_S = 1.0


class ProfileChange(NamedTuple):
    """What a profile changed: a member's ``facts``, the ``ring``, or the member's ``load`` or free memory."""

    facts: bool = False
    ring: bool = False
    load: bool = False


class Fleet:
    """The members of one pool in this router.

    ``hash_key`` is the key of the hashes of prompts. ``epoch_s`` is the time since the epoch at which ``now`` is 0.
    """

    def __init__(self, pool: Pool, hash_key: bytes = PUBLIC_KEY, *, epoch_s: float = 0.0) -> None:
        self._pool = pool
        self._ledger = Ledger(pool.engine.prefill_tokens_per_second)
        self._ledger.fetches.set_prior(pool.kv_store.fetch_tokens_per_second)
        self._others = Others(pool, self._ledger)
        self._profiles = Profiles(pool)
        self._stall_s = pool.routing.rebalance.decode_stall_s
        self._caches = Caches(pool, self._profiles)
        self._reported = ReportedCaches(pool, hash_key)
        self.shares = FairShares(_credit_tokens(pool))
        """How much each client received, which decides whose queued request is next."""
        self.capacity = Capacity(pool, ledger=self._ledger, profiles=self._profiles, shares=self.shares)
        """Whether a member takes another request."""
        self.answers = AnswerTimes()
        """How long the answers of the last requests took."""
        self._waits = MemoryWaits(profiles=self._profiles, capacity=self.capacity, answers=self.answers)
        self.candidates = Candidates(
            pool,
            ledger=self._ledger,
            profiles=self._profiles,
            caches=self._caches,
            reported=self._reported,
            shares=self.shares,
            waits=self._waits,
            epoch_s=epoch_s,
        )
        """The members that may be picked."""

    @property
    def members(self) -> Collection[str]:
        """The ids of all members."""
        return self.candidates.membership.members.keys()

    @property
    def replicas(self) -> int:
        """The number of other routers with a recent report."""
        return self._others.replicas

    @property
    def _membership(self) -> Membership:
        return self.candidates.membership

    # The progress of requests.

    def recounted(self, request: Request) -> Request:
        """Return a request with the tokens of its prompt, as ``Caches.recounted``."""
        return self._caches.recounted(request)

    def will_cache(self, now: float, placed: QueuedRequest) -> None:
        """Record that a placed request's member will cache its prompt; ignore a member that has left."""
        request = placed.request
        self._caches.add(placed.member, request.chain)
        self._reported.claim(now, placed.member, request, predicted_ttft_s=placed.predicted_ttft_s)

    def has_computed(self, request: InFlightRequest) -> None:
        """Record that a request's member has computed its prompt; ignore a member that has left."""
        self._caches.add(request.member, request.chain, computed=True)

    def will_not_cache(self, request: QueuedRequest) -> None:
        """Record that a queued request's member will not compute the prompt; blocks cached earlier stay indexed."""
        self._caches.cut(request.member, request.request.chain, request.matched_tokens)
        self._reported.withdraw(request.member, request.request.id)

    def renewed(self, now: float, queued: QueuedRequest) -> QueuedRequest:
        """Return a request that leaves its member's queue, with the tokens that the member is expected to cache now.

        The request's own blocks and claim do not count: the member has not computed them.
        """
        request, member = queued.request, queued.member
        self._reported.withdraw(member, request.id)
        view = self.candidates.view(now, request.chain, tokens=request.tokens)
        # The record contains the request's own blocks, unless the member has lost its cache since.
        matched_tokens, source = min(queued.matched_tokens, view.recorded_tokens(member)), "records"
        if view.reported is not None:
            reported = view.reported.at_dispatch(member, queued.matched_tokens, matched_tokens)
            if reported is not None:
                matched_tokens, source = reported, "events"
        if (matched_tokens, source) == (queued.matched_tokens, queued.receipt.source):
            return queued
        prefill = self._prefill(member, request, matched_tokens)
        receipt = queued.receipt._replace(matched_tokens=matched_tokens, source=source)
        if receipt.fetch_tokens is not None:
            receipt = receipt._replace(fetch_tokens=prefill.fetch_tokens)
        return replace(
            queued,
            matched_tokens=matched_tokens,
            fetch_tokens=prefill.fetch_tokens,
            compute_s=prefill.seconds,
            receipt=receipt,
        )

    def _stored_tokens(self, request: Request) -> int:
        """Return how many leading tokens of a request's prompt the pool's KV store holds."""
        tier = self.candidates.tier(request.chain, request.stored) if request.stored.tokens else None
        return 0 if tier is None else tier.tokens

    def _prefill(self, member: str, request: Request, matched_tokens: int) -> Prefill:
        """Return the expected prefill of a request at a member that caches ``matched_tokens``."""
        speed, tokens = self._ledger.loads[member].speed.current, request.chain.tokens
        tier = self.candidates.tier(request.chain, request.stored) if request.stored.tokens else None
        if tier is None:
            return Prefill(0, speed.compute_s(tokens - matched_tokens, matched_tokens))
        return tier.prefill(speed, tokens, matched_tokens)

    def dispatched(self, now: float, queued: QueuedRequest) -> InFlightRequest:
        """Record that a request is sent to its member now; return the request in flight."""
        request = queued.request
        self.shares.charge(now, request.client, queued.new_tokens)
        self._others.on_dispatched(request.chain.tokens)
        elsewhere = request.is_prefilled_elsewhere(queued.new_tokens)
        origin = Origin.of(request)
        if elsewhere:
            # The member that computes the prompt reports the cached tokens.
            origin = origin._replace(comparable=False)
        prediction = self._caches.predict(now, queued.member, request.chain, origin, queued.matched_tokens)
        if queued.receipt.source == "events" and prediction.origin.comparable:
            is_held = self._reported.holds_matched(queued.member, request.tokens, queued.matched_tokens)
            prediction = prediction._replace(is_held=is_held)
        stored_tokens = self._stored_tokens(request)
        if stored_tokens > queued.matched_tokens:
            prediction = prediction._replace(is_stored=True)
        in_flight = InFlightRequest(
            request_id=request.id,
            member=queued.member,
            chain=request.chain,
            matched_tokens=queued.matched_tokens,
            stored_tokens=stored_tokens,
            fetch_tokens=queued.fetch_tokens,
            prediction=prediction,
            arrived_s=request.arrived_s,
            dispatched_s=now,
            predicted_ttft_s=queued.predicted_ttft_s,
            compute_s=queued.compute_s,
            heard_s=now,
            answers_since_s=now,
            streamed=request.streamed,
            session=request.session,
            client=request.client,
            sequences=request.sequences,
            prefilled_elsewhere=elsewhere,
            alone=not self._ledger.loads[queued.member].others.load.backlog_s,
        )
        self._ledger.enter(now, in_flight)
        self._reported.claim(now, queued.member, request, predicted_ttft_s=queued.predicted_ttft_s)
        return in_flight

    def take_over(self, now: float, sent: SentRequest) -> bool:
        """Record a request in flight that another router decided; False for an unknown endpoint or a known request.

        The request teaches no speed, because this router does not know which requests its member received before.
        """
        member = self._membership.at(sent.endpoint)
        request = self.recounted(sent.request)
        if member is None or self._ledger.request(request.id) is not None:
            return False
        chain = request.chain
        matched_tokens = min(sent.matched_tokens, chain.tokens)
        prefill = self._prefill(member.id, request, matched_tokens)
        self._caches.add(member.id, chain, computed=sent.prefilled)
        self._ledger.enter(
            now,
            InFlightRequest(
                request_id=request.id,
                member=member.id,
                chain=chain,
                matched_tokens=matched_tokens,
                stored_tokens=self._stored_tokens(request),
                fetch_tokens=prefill.fetch_tokens,
                prediction=self._caches.predict(now, member.id, chain, Origin.of(request), matched_tokens),
                arrived_s=request.arrived_s,
                dispatched_s=sent.sent_s,
                predicted_ttft_s=sent.predicted_ttft_s,
                compute_s=prefill.seconds,
                heard_s=now,
                answers_since_s=sent.sent_s,
                streamed=request.streamed,
                prefilled=sent.prefilled,
                session=request.session,
                client=request.client,
                sequences=request.sequences,
                prefilled_elsewhere=request.is_prefilled_elsewhere(
                    chain.tokens - matched_tokens - prefill.fetch_tokens
                ),
                alone=False,
            ),
        )
        return True

    def hand_over(self, now: float, request_id: str) -> str | None:
        """Remove a request in flight that another router accounts for from now on; return its member.

        Its member still serves the request, so its blocks stay in the index. None for an unknown request.
        """
        request = self._ledger.leave(now, request_id)
        return None if request is None else request.member

    def forget_peer(self, peer: str) -> None:
        """Remove the load that another router reported."""
        self._others.forget_peer(peer)

    def served(self, now: float, request_id: str, endpoint: str) -> tuple[InFlightRequest, str] | None:
        """Move a request to the member that serves it; return the request and its former member.

        The result is None if the request is unknown or its chosen member serves it.
        """
        request = self._ledger.request(request_id)
        if request is None:
            return None
        left, serving = request.member, self._membership.at(endpoint)
        if serving is None or serving is self._membership.members.get(left):
            return None
        self._caches.cut(left, request.chain, request.matched_tokens)
        self._reported.withdraw(left, request_id)
        stored = StoreMatch(request.stored_tokens)
        candidate = self.candidates.view(now, request.chain, stored=stored).candidate(serving.id)
        prediction = self._caches.predict(
            now, serving.id, request.chain, request.prediction.origin, candidate.matched_tokens
        )
        self._ledger.move(
            now,
            request,
            to=serving.id,
            prediction=prediction,
            compute_s=candidate.compute_s,
            fetch_tokens=candidate.fetch_tokens,
        )
        self._caches.add(serving.id, request.chain)
        return request, left

    def heard(self, now: float, request_id: str) -> None:
        """Record a report of a request; ignore an unknown request."""
        self._ledger.heard(now, request_id)

    def first_token(self, now: float, request_id: str) -> InFlightRequest | None:
        """Release a request's pending prefill; None if the request is unknown or already released."""
        request = self._ledger.first_token(now, request_id)
        if request is not None:
            request.answers_since_s = now
            # The member now certainly caches the prompt. An aborted request may have removed the prompt from the index.
            self.has_computed(request)
            self._succeeded(now, request.member)
        return request

    def finished(self, now: float, request_id: str, usage: Usage | None) -> InFlightRequest | None:
        """Remove a request that ended without an error, and learn from it; None if the request is unknown."""
        request = self._ledger.finish(now, request_id)
        if request is not None:
            self._succeeded(now, request.member)
            self.answers.add(now - request.answers_since_s)
            if not request.streamed:
                self.has_computed(request)
            if usage is not None:
                self.measured(now, request_id, usage)
        return request

    def measured(self, now: float, request_id: str, usage: Usage) -> None:
        """Learn from the tokens of an ended request that the engine counted."""
        prediction, output_tokens = self._ledger.on_usage(now, request_id, usage)
        if output_tokens is not None:
            self.capacity.on_output(output_tokens)
        if prediction is None:
            return
        if prediction.is_stored and usage.cached_tokens is not None:
            # Engines count the tokens that they fetched as cached, so more cached tokens say nothing about the member.
            usage = replace(usage, cached_tokens=min(usage.cached_tokens, prediction.matched_tokens))
        self._caches.learn(now, prediction, usage)
        is_member = prediction.member in self._membership.members
        if is_member and prediction.is_held and usage.cached_tokens is not None:
            self._reported.judge(
                now,
                prediction.member,
                prediction.origin.client,
                matched_tokens=prediction.matched_tokens,
                cached_tokens=usage.cached_tokens,
                step=self._caches.reuse_step(prediction.member),
            )

    def interrupted(self, now: float, request_id: str) -> InFlightRequest | None:
        """Remove a request that was aborted or failed; None if the request is unknown."""
        request = self._ledger.leave(now, request_id)
        if request is not None:
            self._uncache_unless_prefilled(request)
        return request

    def failed(self, now: float, member: str, dispatched_s: float) -> bool:
        """Count a failed request that was dispatched at ``dispatched_s``; return whether its member is suspended."""
        if self._ledger.loads[member].suspension.failed(now, dispatched_s):
            self.candidates.update_left_out(now)
        return member in self._membership.suspended

    # Deadlines, versions of the pool, and reports of other routers.

    @property
    def departed(self) -> frozenset[str]:
        """The members whose time to leave has passed."""
        return self._membership.departed

    def next_deadline(self) -> float | None:
        """Return the next time at which ``resume``, ``expire`` or ``expire_others`` must run, or None."""
        times_s = (self._ledger.next_expiry(), self._others.next_expiry(), self.candidates.resume_s)
        return min((each for each in times_s if each is not None), default=None)

    def resume(self, now: float) -> bool:
        """Resume members after the end of their suspension; return whether the time of a member to leave has passed."""
        resume_s = self.candidates.resume_s
        if resume_s is None or now < resume_s:
            return False
        departed = self._membership.departed
        self.candidates.update_left_out(now)
        return departed != self._membership.departed

    def expire(self, now: float) -> list[InFlightRequest]:
        """Remove and return the requests that expired without a report."""
        expired = self._ledger.expire(now)
        for request in expired:
            self._uncache_unless_prefilled(request)
        return expired

    def expire_others(self, now: float) -> None:
        """Remove the load of other routers and of engines without a recent report."""
        self._others.expire(now)

    def specify(self, pool: Pool) -> None:
        """Take a new version of the pool's specification, which ``completed`` then returns."""
        self.candidates.specify(pool)
        self._profiles.adopt(pool)

    def completed(self) -> Pool:
        """Return the specified pool; the members' engines fill the values that the specification leaves open."""
        return self._profiles.complete()

    def on_profile(self, now: float, member: str, profile: EngineProfile) -> ProfileChange:
        """Apply what a member's engine says; ignore an unknown member. Return what has changed."""
        before, asleep, adapters = self._profiles.get(member), self._profiles.asleep, self._profiles.adapters
        if not self._profiles.put(now, member, profile):
            return ProfileChange()
        restarted = _restarted(before, profile)
        if restarted or (profile.asleep and not before.asleep):
            self._caches.forget(member)
            # An engine that restarted may have reported new blocks already. An engine that sleeps has none.
            if profile.asleep:
                self._reported.forget(member)
            else:
                self._reported.forget_claims(member)
        if restarted:
            self._others.forget_restarted(member)
        facts = _facts(profile) != _facts(before)
        if facts:
            self._caches.resize(member)
            self._reported.resize(member, profile)
            self._waits.update(self.members)
        listed = profile.models != before.models
        if listed:
            self.candidates.list_models(member, profile.models)
        if self._profiles.asleep != asleep:
            self.candidates.update_left_out(now)
        facts = facts or self._profiles.adapters is not adapters
        changed = ProfileChange(facts=facts, ring=listed or self._profiles.asleep != asleep)
        # Without a load, or with the load of an earlier report, the last report stays valid for some time.
        is_new = profile.at_s is None or profile.at_s != before.at_s
        if profile.waiting is None or profile.running is None or not is_new:
            return changed
        self._others.on_profile(now, member, profile)
        self._ledger.loads[member].measured(profile.used_tokens)
        return changed._replace(load=True)

    def on_kv_events(self, member: str, rank: int, changes: Sequence[KvChange], status: SourceStatus) -> None:
        """Apply what a rank of a member's engine reports about its cache; ignore an unknown member."""
        if member not in self._membership.members or not self._pool.engine.kv_events.enabled:
            return
        if self._reported.apply(member, rank, changes, status, self._profiles.get(member)):
            self._caches.forget(member)

    def compute_chains(self, tokens: PromptTokens) -> None:
        """Compute the chains of a prompt in the blocks of all members' engines."""
        self._reported.compute_chains(tokens)

    def adopt(self, now: float, pool: Pool) -> set[str]:
        """Apply a new version of the pool; return the members that did not restart.

        A member with the same id but another address or incarnation has restarted: it keeps its keys, but its cache is
        empty.
        """
        previous, self._pool = self._pool, pool
        self._ledger.fetches.set_prior(pool.kv_store.fetch_tokens_per_second)
        self._stall_s = pool.routing.rebalance.decode_stall_s
        self.shares.credit_tokens = _credit_tokens(pool)
        self.capacity.adopt(pool)
        known = {member.id: (member.endpoint, member.incarnation) for member in previous.members}
        stayed = {member.id for member in pool.members if known.get(member.id) == (member.endpoint, member.incarnation)}
        self._caches.adopt(pool, stayed)
        self._reported.adopt(pool, stayed)
        self.candidates.adopt(pool)
        self._ledger.set_prior(pool.engine.prefill_tokens_per_second)
        self._others.adopt(pool, self._profiles.members)
        self.candidates.update_left_out(now)
        return stayed

    def forget_gone(self) -> None:
        """Remove the load of members that have left the pool and have no requests in flight or queued."""
        self._ledger.retain(set(self._membership.members))

    def on_loads(self, said_s: float, peer: str, loads: Mapping[str, SharedLoad], *, age_s: float) -> None:
        """Store another router's load per member, as ``Others.on_loads``."""
        self._others.on_loads(said_s, peer, loads, age_s=age_s)

    def on_placement(self, now: float, placed_s: float, placement: Placement) -> None:
        """Record that another router sent a prompt to an endpoint at ``placed_s``, up to the longest prompt's blocks.

        The claim of the prompt assumes that the prompt waits for the member's present backlog.
        """
        member = self._membership.at(placement.endpoint)
        if member is None:
            return
        hashes = self._caches.add_placed(member.id, placement.hashes)
        compute_s = self._ledger.loads[member.id].speed.current.compute_s(len(hashes) * self._caches.block_tokens, 0)
        expected_s = self.capacity.queue_s(now, member.id) + compute_s
        self._reported.claim_placed(now, member.id, hashes, placed_s=min(placed_s, now), expected_s=expected_s)

    def own_loads(self, now: float) -> dict[str, SharedLoad]:
        """Return this router's load per member for the other routers, without idle members."""
        loads = {}
        for member, load in self._ledger.loads.items():
            load.end_overdue(now)
            if load.working or load.queue:
                loads[member] = SharedLoad(
                    pending_prefill_tokens=load.prefills.tokens + load.queue.tokens,
                    backlog_s=load.prefills.backlog_s(now, self._stall_s),
                    held_s=load.queue.ahead_s,
                    in_flight=load.kv.sequences,
                    active_kv_tokens=load.kv.tokens,
                )
        return loads

    def solo_tokens_per_second(self) -> float:
        """Return the mean speed of the members that are not draining; 0 without any."""
        serving = [each.id for each in self._pool.members if each.state is not MemberState.DRAINING]
        speeds = [self._ledger.loads[each].speed.solo_tokens_per_second for each in serving]
        return sum(speeds) / len(speeds) if speeds else 0.0

    def statuses(self) -> tuple[EndpointStatus, ...]:
        """Return the status of every member in this router."""
        return tuple(self._status(member) for member in self._membership.members.values())

    def _succeeded(self, now: float, member: str) -> None:
        self._ledger.loads[member].suspension.succeeded()
        if member in self.candidates.membership.suspended:
            self.candidates.update_left_out(now)

    def _uncache_unless_prefilled(self, request: InFlightRequest) -> None:
        """Remove the blocks of an aborted or failed request from the index, unless its prefill ended.

        A failing engine must not receive the next request because of blocks that it never cached.
        """
        if not request.prefilled:
            self._caches.cut(request.member, request.chain, request.matched_tokens)
            self._reported.withdraw(request.member, request.request_id)

    def _status(self, member: Member) -> EndpointStatus:
        load = self._ledger.loads[member.id]
        return EndpointStatus(
            id=member.id,
            endpoint=member.endpoint,
            state=member.state.value,
            weight=member.weight,
            in_flight=load.in_flight,
            held=len(load.queue),
            pending_prefill_tokens=load.prefills.tokens,
            held_prefill_tokens=load.queue.tokens,
            active_kv_tokens=load.kv.tokens,
            indexed_blocks=len(self._caches.index(member.id)),
            prefill_tokens_per_second=load.speed.current.tokens_per_second,
            solo_tokens_per_second=load.speed.solo_tokens_per_second,
            suspended=member.id in self._membership.suspended,
            leave_at_s=member.leave_at_s,
            engine=self._profiles.get(member.id),
            events=self._events_status(member.id),
        )

    def _events_status(self, member: str) -> EventsStatus:
        """Return the state of a member's KV events. A member whose engine publishes none has no source."""
        events = self._reported.status(member)
        if events.state is SourceState.OFF and self._pool.engine.kv_events.enabled:
            return replace(events, reason=self._profiles.get(member).events_problem)
        return events


def _credit_tokens(pool: Pool) -> int:
    """Return the prompt tokens that the pool computes within the SLO."""
    return round(pool.slo.ttft_s * pool.engine.prefill_tokens_per_second) * len(pool.members)


def _facts(profile: EngineProfile) -> tuple[object, ...]:
    """Return the facts on which the pool, or a member's index or memory depends."""
    return profile.block_tokens, profile.kv_tokens, profile.cache_tokens, profile.max_model_len, profile.adapters


def _restarted(before: EngineProfile, after: EngineProfile) -> bool:
    """Return whether two profiles of a member are of different processes of its engine."""
    if before.started_s is None or after.started_s is None:
        return False
    return abs(after.started_s - before.started_s) > _SAME_START_S
