"""The facade of a pool's members: the members that may be picked, and each member's cache, load and free memory.

The dispatcher and the chooser read candidates from the fleet; the router reports events to it. The fleet's components
(membership, caches, ledger, peers, foreign work) do not use each other, and only this package uses them.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple
from weakref import WeakKeyDictionary

from dualmap.engines.profile import EngineProfile
from dualmap.engines.profiles import Profiles
from dualmap.engines.prompt_tokens import PromptTokens
from dualmap.engines.residency import KvChange
from dualmap.engines.source import SourceState, SourceStatus
from dualmap.fleet.caches import Caches
from dualmap.fleet.estimate import PrefillModel
from dualmap.fleet.foreign import ForeignWork
from dualmap.fleet.in_flight import InFlightRequest
from dualmap.fleet.ledger import Ledger
from dualmap.fleet.listed_models import ListedModels
from dualmap.fleet.reported import ReportedCaches
from dualmap.fleet.usage import Origin
from dualmap.fleet.view import Everyone, Instance, Roster, View
from dualmap.keys.membership import Membership
from dualmap.keys.rings import DualRing
from dualmap.pools.pool import Member, MemberState, Pool
from dualmap.prompts.blocks import PUBLIC_KEY, BlockChain
from dualmap.queue.fair_shares import FairShares
from dualmap.queue.request_queue import MemberQueue, QueuedRequest
from dualmap.replicas.peers import PEER_TTL_S, OthersLoad, Peers
from dualmap.replicas.plausible import LoadLimits
from dualmap.replicas.update import Placement, SharedLoad
from dualmap.requests import EndpointStatus, EventsStatus, Request, SentRequest, Usage

# The initial estimate of a request's mean output tokens, and the weight of each completed request in that mean.
_OUTPUT_TOKENS = 200.0
_OUTPUT_WEIGHT = 0.02
# The memory reserved for outputs is this factor times their mean, because the sum of outputs varies. The value is from
# exploratory simulations without recorded results.
_OUTPUT_MARGIN = 1.5
# The part of the dispatch window in use while clients contest their shares. Exploratory simulations, which are not
# recorded, led to the value: a smaller part would leave engines idle between requests.
_CONTESTED_WINDOW = 0.25
# A request that has waited for this part of its SLO (or of the longest wait) may use this replica's share of a member.
_SHARE_AFTER = 0.5
# A report of an earlier process of an engine contains another start time, apart from rounding.
_SAME_START_S = 1.0
# A tolerance for floating-point errors: at the time that next_dispatch_s returns, the backlog equals the window.
_WINDOW_SLACK_S = 1e-6


class ProfileChange(NamedTuple):
    """What a profile changed: a member's ``facts``, the ``ring``, or the member's ``load`` or free memory."""

    facts: bool = False
    ring: bool = False
    load: bool = False


class Fleet:
    """The members of one pool in this router. ``hash_key`` is the key of the hashes of prompts."""

    def __init__(self, pool: Pool, hash_key: bytes = PUBLIC_KEY) -> None:
        self._membership = Membership(pool)
        self._ledger = Ledger(pool.engine.prefill_tokens_per_second)
        self._peers = Peers()
        self._foreign = ForeignWork()
        self._profiles = Profiles(pool)
        self._models = ListedModels(self._membership.members)
        self._specified_adapters = frozenset(pool.model.adapters)
        # The time at which the first suspension ends.
        self._resume_s: float | None = None
        self._output_tokens = _OUTPUT_TOKENS
        self.shares = FairShares(_credit_tokens(pool))
        """How much each client received, which decides whose queued request is next."""
        self._pool = pool
        self._limits = _load_limits(pool)
        self._share_after_s = _SHARE_AFTER * min(pool.slo.ttft_s, pool.routing.queue.max_wait_s)
        self._stall_s = pool.routing.rebalance.decode_stall_s
        self._caches = Caches(pool, self._profiles)
        self._reported = ReportedCaches(pool, hash_key)
        self._instances = self._new_instances()
        self._rosters = WeakKeyDictionary[DualRing, Roster]()

    # The pool's members, and the members that may be picked.

    @property
    def size(self) -> int:
        """The number of members that new keys may map to, including suspended members."""
        return self._membership.size

    @property
    def members(self) -> Collection[str]:
        """The ids of all members."""
        return self._membership.members.keys()

    @property
    def peers(self) -> int:
        """The number of other replicas with a recent report."""
        return len(self._peers)

    def ring(self, subset: frozenset[str] | None) -> DualRing:
        """Return the two hash rings over the members that a request may use."""
        return self._membership.ring(subset)

    def rings(self, request: Request) -> tuple[DualRing, DualRing | None]:
        """Return the rings over the members that a request may use, and over those that it prefers (None: all).

        A request prefers members that have its adapter loaded. Members that are known to lack the adapter are left out
        if only engines say that the pool has the adapter. If the specification says so, they may load it on demand.
        """
        if not request.adapter:
            return self.rings_of_model(request.subset, request.model)
        of = self._models.of(request.adapter)
        lacking = frozenset[str]() if request.adapter in self._specified_adapters else of.lacking
        loaded = self._membership.ring_of(request.subset, of.absent) if of.absent != lacking else None
        return self._membership.ring(request.subset, lacking), loaded

    def rings_of_model(self, subset: frozenset[str] | None, model: str) -> tuple[DualRing, DualRing | None]:
        """Return the rings over the members for a name of the base model, and over those preferred (None: all).

        Members that are known not to list the name are left out if their type of engine rejects other names. Otherwise,
        they are only not preferred: most of these engines answer a request for any name.
        """
        lacking = self._models.of(model).lacking if model else frozenset[str]()
        if not lacking:
            return self._membership.ring(subset), None
        if self._pool.engine.checks_names:
            return self._membership.ring(subset, lacking), None
        return self._membership.ring(subset), self._membership.ring_of(subset, lacking)

    def adapter_state(self, adapter: str, member: str) -> str:
        """Return what is known of an adapter at a member, as the receipt says it; empty without an adapter."""
        return self._models.of(adapter).state(member) if adapter else ""

    def endpoint(self, member: str) -> str | None:
        """Return a member's endpoint, or None if the member has left."""
        instance = self._instances.get(member)
        return None if instance is None else instance.endpoint

    # The members' state for decisions.

    def view(self, now: float, chain: BlockChain, *, client: int = 0, tokens: PromptTokens | None = None) -> View:
        """Return a view of the members for one prompt of a client."""
        behind_s = partial(self._behind_s, client) if self.shares.has_rivals(client) else None
        reported = self._reported.matches(now, tokens, chain, self._caches.reuse_step)
        return View(
            now,
            chain,
            self._instances,
            self._caches.tree,
            stall_s=self._stall_s,
            reported=reported,
            behind_s=behind_s,
        )

    def everyone(self, view: View, ring: DualRing) -> Everyone:
        """Return all members of a ring for the view's prompt."""
        return Everyone(view, partial(self._roster, view.now, ring))

    def backlog_s(self, now: float, member: str) -> float:
        """Return the seconds of prefill that were sent to a member and have no observed end."""
        load = self._ledger.loads[member]
        load.end_overdue(now)
        return load.backlog_s(now, self._stall_s)

    def is_open(self, now: float, member: str, *, waited_s: float) -> bool:
        """Whether a member takes a request that has waited for ``waited_s``: its backlog is within the dispatch window.

        A request that has waited for long may use this replica's share of the window, whatever other replicas report.
        """
        if self.backlog_s(now, member) <= self.window_s(now):
            return True
        load = self._ledger.loads[member]
        return waited_s + _WINDOW_SLACK_S >= self._share_after_s and load.within_share(
            now, self._stall_s, self.window_s(now)
        )

    def queue_s(self, now: float, member: str) -> float:
        """Return a member's T_q (paper eq. 7): the time until a new request's prefill would start there.

        A new request goes before the late requests, which are deferred.
        """
        return self._ledger.loads[member].queue_s(now, self._stall_s)

    def has_room(self, member: str, prompt_tokens: int, *, waited_s: float) -> bool:
        """Return whether a prompt fits into a member's KV memory now; True if the memory's size is unknown.

        A request that has waited for long may use this replica's share of the memory, as in ``is_open``.
        """
        kv_tokens, output_tokens = self._profiles.kv_tokens(member), _OUTPUT_MARGIN * self._output_tokens
        if kv_tokens is None:
            return True
        load = self._ledger.loads[member]
        if load.has_room(prompt_tokens, kv_tokens, output_tokens=output_tokens):
            return True
        in_share = waited_s + _WINDOW_SLACK_S >= self._share_after_s
        return in_share and load.has_room_in_share(prompt_tokens, kv_tokens, output_tokens=output_tokens)

    def queue(self, member: str) -> MemberQueue:
        """Return the queue of a member."""
        return self._ledger.loads[member].queue

    def window_s(self, now: float) -> float:
        """Return the dispatch window: a member takes requests while its backlog is within it."""
        return self._dispatch_window_s(now) + _WINDOW_SLACK_S

    def next_dispatch_s(self, *, after_s: float) -> float | None:
        """Return the first dispatch time after ``after_s`` without an event; None if a dispatch needs an event."""
        window_s = self._dispatch_window_s(after_s)
        return self._ledger.dispatch_times.first_s(window_s, after_s=after_s, share_after_s=self._share_after_s)

    def retry_after_s(self, now: float, member: str | None) -> float | None:
        """Return the recommended time before a retry of a rejected request; None if unknown.

        By that time, the requests that are now queued for ``member`` are served or rejected. If the pool has no member,
        a new member may have started by that time.
        """
        max_wait_s = self._pool.routing.queue.max_wait_s
        if member is not None:
            return min(self._ledger.loads[member].ends_s(now, self._stall_s), max_wait_s)
        return None if self.size else max_wait_s

    # The progress of requests.

    def recounted(self, request: Request) -> Request:
        """Return a request with the tokens of its prompt as the engines' counts let expect."""
        return self._caches.recounted(request)

    def will_cache(self, now: float, placed: QueuedRequest) -> None:
        """Record that a placed request's member will cache its prompt; ignore a member that has left."""
        request = placed.request
        self._caches.add(placed.member, request.chain)
        self._claim(now, placed)

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
        view = self.view(now, request.chain, tokens=request.tokens)
        # The record contains the request's own blocks, unless the member has lost its cache since.
        matched_tokens, source = min(queued.matched_tokens, view.recorded_tokens(member)), "records"
        if view.reported is not None:
            reported = view.reported.at_dispatch(member, queued.matched_tokens, matched_tokens)
            if reported is not None:
                matched_tokens, source = reported, "events"
        if (matched_tokens, source) == (queued.matched_tokens, queued.receipt.source):
            return queued
        return replace(
            queued,
            matched_tokens=matched_tokens,
            compute_s=self._ledger.loads[member].speed.current.compute_s(
                request.chain.tokens - matched_tokens, matched_tokens
            ),
            receipt=queued.receipt._replace(matched_tokens=matched_tokens, source=source),
        )

    def dispatched(self, now: float, queued: QueuedRequest) -> InFlightRequest:
        """Record that a request is sent to its member now; return the request in flight."""
        request = queued.request
        self.shares.charge(now, request.client, queued.new_tokens)
        self._foreign.on_dispatched(request.chain.tokens)
        prediction = self._caches.predict(now, queued.member, request.chain, Origin.of(request), queued.matched_tokens)
        if queued.receipt.source == "events" and prediction.origin.comparable:
            is_held = self._reported.holds_matched(queued.member, request.tokens, queued.matched_tokens)
            prediction = prediction._replace(is_held=is_held)
        in_flight = InFlightRequest(
            request_id=request.id,
            member=queued.member,
            chain=request.chain,
            matched_tokens=queued.matched_tokens,
            prediction=prediction,
            arrived_s=request.arrived_s,
            dispatched_s=now,
            predicted_ttft_s=queued.predicted_ttft_s,
            compute_s=queued.compute_s,
            heard_s=now,
            streamed=request.streamed,
            session=request.session,
            client=request.client,
            sequences=request.sequences,
            alone=not self._ledger.loads[queued.member].others.load.backlog_s,
        )
        self._ledger.enter(now, in_flight)
        self._claim(now, queued)
        return in_flight

    def take_over(self, now: float, sent: SentRequest) -> bool:
        """Record a request in flight that another router decided; False for an unknown endpoint or a known request.

        The request teaches no speed, because this router does not know what was before it at its member.
        """
        member = self._membership.at(sent.endpoint)
        request = self.recounted(sent.request)
        if member is None or self._ledger.request(request.id) is not None:
            return False
        chain, load = request.chain, self._ledger.loads[member.id]
        matched_tokens = min(sent.matched_tokens, chain.tokens)
        self._caches.add(member.id, chain, computed=sent.prefilled)
        self._ledger.enter(
            now,
            InFlightRequest(
                request_id=request.id,
                member=member.id,
                chain=chain,
                matched_tokens=matched_tokens,
                prediction=self._caches.predict(now, member.id, chain, Origin.of(request), matched_tokens),
                arrived_s=request.arrived_s,
                dispatched_s=sent.sent_s,
                predicted_ttft_s=sent.predicted_ttft_s,
                compute_s=load.speed.current.compute_s(chain.tokens - matched_tokens, matched_tokens),
                heard_s=now,
                streamed=request.streamed,
                prefilled=sent.prefilled,
                session=request.session,
                client=request.client,
                sequences=request.sequences,
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
        """Remove the load that another replica reported."""
        self._update_others(self._peers.forget(peer))

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
        candidate = self.view(now, request.chain).candidate(serving.id)
        prediction = self._caches.predict(
            now, serving.id, request.chain, request.prediction.origin, candidate.matched_tokens
        )
        self._ledger.move(now, request, to=serving.id, prediction=prediction, compute_s=candidate.compute_s)
        self._caches.add(serving.id, request.chain)
        return request, left

    def heard(self, now: float, request_id: str) -> None:
        """Record a report of a request; ignore an unknown request."""
        self._ledger.heard(now, request_id)

    def first_token(self, now: float, request_id: str) -> InFlightRequest | None:
        """Release a request's pending prefill; None if the request is unknown or already released."""
        request = self._ledger.first_token(now, request_id)
        if request is not None:
            # The member now certainly caches the prompt. An aborted request may have removed the prompt from the index.
            self.has_computed(request)
            self._succeeded(now, request.member)
        return request

    def finished(self, now: float, request_id: str, usage: Usage | None) -> InFlightRequest | None:
        """Remove a request that ended without an error, and learn from it; None if the request is unknown."""
        request = self._ledger.finish(now, request_id)
        if request is not None:
            self._succeeded(now, request.member)
            if not request.streamed:
                self.has_computed(request)
            if usage is not None:
                self.measured(now, request_id, usage)
            if usage is not None and usage.completion_tokens is not None:
                self._output_tokens += _OUTPUT_WEIGHT * (usage.completion_tokens - self._output_tokens)
        return request

    def measured(self, now: float, request_id: str, usage: Usage) -> None:
        """Compare an ended request's tokens as the engine counted them with those that were estimated."""
        if usage.prompt_tokens is None:
            return
        prediction = self._ledger.on_prompt_tokens(request_id, usage.prompt_tokens)
        if prediction is None:
            return
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

    def broke_off(self, now: float, request_id: str) -> InFlightRequest | None:
        """Remove a request that was aborted or failed; None if the request is unknown."""
        request = self._ledger.leave(now, request_id)
        if request is not None:
            self._uncache_unless_prefilled(request)
        return request

    def failed(self, now: float, member: str, dispatched_s: float) -> bool:
        """Count a failed request that was dispatched at ``dispatched_s``; return whether its member is suspended."""
        if self._ledger.loads[member].suspension.failed(now, dispatched_s):
            self._update_left_out(now)
        return member in self._membership.suspended

    # Deadlines, versions of the pool, and reports of other replicas.

    def next_deadline(self) -> float | None:
        """Return the next time at which ``resume``, ``expire`` or ``expire_peers`` must run, or None."""
        times_s = (
            self._ledger.next_expiry(),
            self._peers.next_expiry(),
            self._foreign.next_expiry(),
            self._resume_s,
        )
        return min((each for each in times_s if each is not None), default=None)

    def resume(self, now: float) -> None:
        """Resume members after the end of their suspension."""
        if self._resume_s is not None and now >= self._resume_s:
            self._update_left_out(now)

    def expire(self, now: float) -> list[InFlightRequest]:
        """Remove and return the requests that expired without a report."""
        expired = self._ledger.expire(now)
        for request in expired:
            self._uncache_unless_prefilled(request)
        return expired

    def expire_peers(self, now: float) -> None:
        """Remove the load of replicas and of engines without a recent report."""
        self._update_others(self._peers.expire(now) | self._foreign.expire(now))

    def specify(self, pool: Pool) -> None:
        """Take a new version of the pool's specification, which ``completed`` then returns."""
        self._specified_adapters = frozenset(pool.model.adapters)
        self._profiles.adopt(pool)

    def completed(self) -> Pool:
        """Return the specified pool with what the members' engines say about values that it leaves open."""
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
        if restarted and self._foreign.forget(member):
            self._update_others({member})
        facts = _facts(profile) != _facts(before)
        if facts:
            self._caches.resize(member)
            self._reported.resize(member, profile)
        listed = profile.models != before.models
        if listed:
            self._models.put(member, profile.models)
        if self._profiles.asleep != asleep:
            self._update_left_out(now)
        facts = facts or self._profiles.adapters is not adapters
        changed = ProfileChange(facts=facts, ring=listed or self._profiles.asleep != asleep)
        # Without a load, or with the load of an earlier report, the last report stays valid for some time.
        is_new = profile.at_s is None or profile.at_s != before.at_s
        if profile.waiting is None or profile.running is None or not is_new:
            return changed
        self._count_foreign(now, member, profile)
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
        self._limits = _load_limits(pool)
        self._share_after_s = _SHARE_AFTER * min(pool.slo.ttft_s, pool.routing.queue.max_wait_s)
        self._stall_s = pool.routing.rebalance.decode_stall_s
        self.shares.credit_tokens = _credit_tokens(pool)
        self._membership = Membership(pool)
        known = {member.id: (member.endpoint, member.incarnation) for member in previous.members}
        stayed = {member.id for member in pool.members if known.get(member.id) == (member.endpoint, member.incarnation)}
        self._caches.adopt(pool, stayed)
        self._reported.adopt(pool, stayed)
        self._instances = self._new_instances()
        self._foreign.retain(self._profiles.members)
        self._models.adopt(self._membership.members, self._profiles.members)
        self._ledger.set_prior(pool.engine.prefill_tokens_per_second)
        for member in self._membership.members:
            # others_changed also outdates every summary, because the new version of the pool may have other settings.
            self._ledger.loads[member].others_changed(partial(self._others_load, member))
        self._update_left_out(now)
        return stayed

    def forget_gone(self) -> None:
        """Remove the load of members that have left the pool and have no requests in flight or queued."""
        self._ledger.retain(set(self._membership.members))

    def on_loads(self, said_s: float, peer: str, loads: Mapping[str, SharedLoad], *, age_s: float) -> None:
        """Store another replica's load per member, reported at ``said_s``; ignore a report that is too old.

        A load above the limits is reduced to the limits. The pool may know a member later than the other replica.
        """
        if age_s >= PEER_TTL_S:
            return
        clamp = self._limits.clamp
        loads = {member: clamp(load) for member, load in loads.items()}
        for member in self._membership.members.keys() & loads:
            # Only requests in flight delay other prefills at the member; queued requests do not.
            if loads[member].backlog_s:
                self._ledger.loads[member].others.busy(said_s)
        self._update_others(self._peers.hear(said_s, peer, loads))

    def on_placement(self, now: float, placed_s: float, placement: Placement) -> None:
        """Record that another replica sent a prompt to an endpoint at ``placed_s``, up to the longest prompt's blocks.

        The claim of the prompt assumes that the prompt waits for the member's present backlog.
        """
        member = self._membership.at(placement.endpoint)
        if member is None:
            return
        hashes = self._caches.add_placed(member.id, placement.hashes)
        compute_s = self._ledger.loads[member.id].speed.current.compute_s(len(hashes) * self._caches.block_tokens, 0)
        expected_s = self.queue_s(now, member.id) + compute_s
        self._reported.claim_placed(now, member.id, hashes, placed_s=min(placed_s, now), expected_s=expected_s)

    def own_loads(self, now: float) -> dict[str, SharedLoad]:
        """Return this replica's load per member for the other replicas, without idle members."""
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

    def statuses(self) -> tuple[EndpointStatus, ...]:
        """Return the status of every member in this router."""
        return tuple(self._status(member) for member in self._membership.members.values())

    def _succeeded(self, now: float, member: str) -> None:
        self._ledger.loads[member].suspension.succeeded()
        if member in self._membership.suspended:
            self._update_left_out(now)

    def _count_foreign(self, now: float, member: str, profile: EngineProfile) -> None:
        """Update the load of the requests at a member that came through no router."""
        load = self._ledger.loads[member]
        load.end_overdue(now)
        foreign = self._foreign.count(member, profile, load, self._peers.load(member))
        if foreign is not None:
            foreign = self._limits.clamp(foreign)
            if foreign.backlog_s:
                load.others.busy(now)
        if self._foreign.put(now, member, foreign):
            self._update_others({member})

    def _update_left_out(self, now: float) -> None:
        """Remove suspended and asleep members from the rings, and add resumed members again."""
        until_s = {
            member: load.suspension.until_s
            for member, load in self._ledger.loads.items()
            if load.suspension.until_s is not None
            and load.suspension.until_s > now
            and member in self._membership.members
        }
        self._resume_s = min(until_s.values(), default=None)
        asleep = self._profiles.asleep
        if until_s.keys() != self._membership.suspended or asleep != self._membership.asleep:
            self._membership.leave_out(suspended=until_s, asleep=asleep)

    def _update_others(self, members: set[str]) -> None:
        for member in members & self._membership.members.keys():
            self._ledger.loads[member].others_changed(partial(self._others_load, member))

    def _others_load(self, member: str) -> OthersLoad:
        """Return the load at a member that is not this router's."""
        return self._peers.load(member).plus(self._foreign.load(member))

    def _uncache_unless_prefilled(self, request: InFlightRequest) -> None:
        """Remove the blocks of an aborted or failed request from the index, unless its prefill ended.

        A failing engine must not receive the next request because of blocks that it never cached.
        """
        if not request.prefilled:
            self._caches.cut(request.member, request.chain, request.matched_tokens)
            self._reported.withdraw(request.member, request.request_id)

    def _claim(self, now: float, placed: QueuedRequest) -> None:
        waited_s = max(0.0, now - placed.request.arrived_s)
        expected_s = max(0.0, placed.predicted_ttft_s - waited_s)
        self._reported.claim(now, placed.member, placed.request, expected_s=expected_s)

    def _dispatch_window_s(self, now: float) -> float:
        window_s = self._pool.routing.queue.dispatch_window_s
        return window_s * _CONTESTED_WINDOW if self.shares.is_contested(now) else window_s

    def _behind_s(self, client: int, queue: MemberQueue) -> float:
        return queue.behind_s(client, self.shares.counter)

    def _roster(self, now: float, ring: DualRing) -> Roster:
        """Return a ring's instances with current summaries."""
        self._ledger.update(now, self._stall_s)
        roster = self._rosters.get(ring)
        if roster is None:
            roster = self._rosters[ring] = Roster(tuple(self._instances[member.id] for member in ring.members))
        return roster

    def _new_instances(self) -> dict[str, Instance]:
        return {
            member.id: Instance(
                member=member,
                endpoint=member.endpoint,
                state=member.state.value,
                load=self._ledger.loads[member.id],
                index=self._caches.index(member.id),
            )
            for member in self._pool.members
        }

    def solo_tokens_per_second(self) -> float:
        """Return the mean speed of the members that are not draining; 0 without any."""
        serving = [each.id for each in self._pool.members if each.state is not MemberState.DRAINING]
        speeds = [self._ledger.loads[each].speed.solo_tokens_per_second for each in serving]
        return sum(speeds) / len(speeds) if speeds else 0.0

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
            indexed_blocks=len(self._instances[member.id].index),
            prefill_tokens_per_second=load.speed.current.tokens_per_second,
            solo_tokens_per_second=load.speed.solo_tokens_per_second,
            suspended=member.id in self._membership.suspended,
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


def _load_limits(pool: Pool) -> LoadLimits:
    queue, tokens = pool.routing.queue, pool.engine.max_model_len
    longest_s = PrefillModel(pool.engine.prefill_tokens_per_second).speed.compute_s(tokens, 0)
    return LoadLimits(
        backlog_s=queue.dispatch_window_s + longest_s,
        held_s=queue.max_wait_s,
        max_held=queue.max_held,
        prompt_tokens=tokens,
    )
