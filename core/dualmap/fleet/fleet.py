"""The facade of a pool's members: the members that may be picked, and each member's cache, load and free memory.

The dispatcher and the chooser read candidates from the fleet; the router reports events to it. The fleet's components
(membership, prefix indexes, ledger, peers) do not use each other, and only this package uses them.
"""

from collections.abc import Collection, Mapping
from functools import partial
from weakref import WeakKeyDictionary

from dualmap.fleet.estimate import PrefillModel
from dualmap.fleet.in_flight import InFlightRequest
from dualmap.fleet.ledger import Ledger
from dualmap.fleet.prefix_index import PrefixIndex, PrefixTree
from dualmap.fleet.view import Everyone, Instance, Roster, View
from dualmap.keys.membership import Membership
from dualmap.keys.rings import DualRing
from dualmap.pools.pool import Member, Pool
from dualmap.prompts.blocks import MAX_BLOCKS, BlockChain
from dualmap.queue.fair_shares import FairShares
from dualmap.queue.request_queue import MemberQueue, QueuedRequest
from dualmap.replicas.peers import PEER_TTL_S, Peers
from dualmap.replicas.plausible import LoadLimits
from dualmap.replicas.update import Placement, SharedLoad
from dualmap.requests import EndpointStatus, Usage

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
# A tolerance for floating-point errors: at the time that next_dispatch_s returns, the backlog equals the window.
_WINDOW_SLACK_S = 1e-6


class Fleet:
    """The members of one pool in this router."""

    def __init__(self, pool: Pool) -> None:
        self._membership = Membership(pool)
        self._ledger = Ledger(pool.engine.prefill_tokens_per_second)
        self._peers = Peers()
        # The time at which the first suspension ends.
        self._resume_s: float | None = None
        self._output_tokens = _OUTPUT_TOKENS
        self.shares = FairShares(_credit_tokens(pool))
        """How much each client received, which decides whose queued request is next."""
        self._pool = pool
        self._limits = _load_limits(pool)
        self._share_after_s = _SHARE_AFTER * min(pool.slo.ttft_s, pool.routing.queue.max_wait_s)
        self._stall_s = pool.routing.rebalance.decode_stall_s
        self._tree = PrefixTree()
        self._instances = {member.id: self._instance(member, self._new_index()) for member in pool.members}
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

    def endpoint(self, member: str) -> str | None:
        """Return a member's endpoint, or None if the member has left."""
        instance = self._instances.get(member)
        return None if instance is None else instance.endpoint

    # The members' state for decisions.

    def view(self, now: float, chain: BlockChain, *, client: int = 0) -> View:
        """Return a view of the members for one prompt of a client."""
        behind_s = partial(self._behind_s, client) if self.shares.has_rivals(client) else None
        return View(now, chain, self._instances, self._tree, stall_s=self._stall_s, behind_s=behind_s)

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
        """Return a member's T_q (paper eq. 7): the time until a new request's prefill would start there."""
        return self._ledger.loads[member].queue_s(now, self._stall_s)

    def has_room(self, member: str, prompt_tokens: int, *, waited_s: float) -> bool:
        """Return whether a prompt fits into a member's KV memory now; True if the memory's size is unknown.

        A request that has waited for long may use this replica's share of the memory, as in ``is_open``.
        """
        kv_tokens, output_tokens = self._pool.engine.kv_tokens, _OUTPUT_MARGIN * self._output_tokens
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
            return min(self.queue_s(now, member), max_wait_s)
        return None if self.size else max_wait_s

    # The progress of requests.

    def will_cache(self, member: str, chain: BlockChain) -> None:
        """Record that a member caches a prompt or will cache it; ignore a member that has left."""
        if member in self._instances:
            self._instances[member].index.add(chain.cacheable)

    def will_not_cache(self, request: QueuedRequest) -> None:
        """Record that a queued request's member will not compute the prompt; blocks cached earlier stay indexed."""
        self._uncache(request.member, request.request.chain, request.matched_tokens)

    def dispatched(self, now: float, queued: QueuedRequest) -> InFlightRequest:
        """Record that a request is sent to its member now; return the request in flight."""
        request = queued.request
        self.shares.charge(now, request.client, queued.new_tokens)
        in_flight = InFlightRequest(
            request_id=request.id,
            member=queued.member,
            chain=request.chain,
            matched_tokens=queued.matched_tokens,
            arrived_s=request.arrived_s,
            dispatched_s=now,
            predicted_ttft_s=queued.predicted_ttft_s,
            compute_s=queued.compute_s,
            heard_s=now,
            streamed=request.streamed,
            session=request.session,
            client=request.client,
            alone=not self._ledger.loads[queued.member].others.load.backlog_s,
        )
        self._ledger.enter(now, in_flight)
        return in_flight

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
        self._uncache(left, request.chain, request.matched_tokens)
        candidate = self.view(now, request.chain).candidate(serving.id)
        self._ledger.move(
            now, request, to=serving.id, matched_tokens=candidate.matched_tokens, compute_s=candidate.compute_s
        )
        self.will_cache(serving.id, request.chain)
        return request, left

    def heard(self, now: float, request_id: str) -> None:
        """Record a report of a request; ignore an unknown request."""
        self._ledger.heard(now, request_id)

    def first_token(self, now: float, request_id: str) -> InFlightRequest | None:
        """Release a request's pending prefill; None if the request is unknown or already released."""
        request = self._ledger.first_token(now, request_id)
        if request is not None:
            # The member now certainly caches the prompt. An aborted request may have removed the prompt from the index.
            self.will_cache(request.member, request.chain)
            self._succeeded(now, request.member)
        return request

    def finished(self, now: float, request_id: str, usage: Usage | None) -> InFlightRequest | None:
        """Remove a request that ended without an error, and learn from it; None if the request is unknown."""
        request = self._ledger.finish(now, request_id)
        if request is not None:
            self._succeeded(now, request.member)
            if usage is not None:
                self.measured(request_id, usage)
            if usage is not None and usage.completion_tokens is not None:
                self._output_tokens += _OUTPUT_WEIGHT * (usage.completion_tokens - self._output_tokens)
        return request

    def measured(self, request_id: str, usage: Usage) -> None:
        """Compare an ended request's prompt tokens as the engine counted them with those that were estimated."""
        if usage.prompt_tokens is not None:
            self._ledger.on_prompt_tokens(request_id, usage.prompt_tokens)

    def broke_off(self, now: float, request_id: str) -> InFlightRequest | None:
        """Remove a request that was aborted or failed; None if the request is unknown."""
        request = self._ledger.leave(now, request_id)
        if request is not None:
            self._uncache_unless_prefilled(request)
        return request

    def failed(self, now: float, member: str, dispatched_s: float) -> bool:
        """Count a failed request that was dispatched at ``dispatched_s``; return whether its member is suspended."""
        if self._ledger.loads[member].suspension.failed(now, dispatched_s):
            self._update_suspended(now)
        return member in self._membership.suspended

    # Deadlines, versions of the pool, and reports of other replicas.

    def next_deadline(self) -> float | None:
        """Return the next time at which ``resume``, ``expire`` or ``expire_peers`` must run, or None."""
        times_s = (self._ledger.next_expiry(), self._peers.next_expiry(), self._resume_s)
        return min((each for each in times_s if each is not None), default=None)

    def resume(self, now: float) -> None:
        """Resume members after the end of their suspension."""
        if self._resume_s is not None and now >= self._resume_s:
            self._update_suspended(now)

    def expire(self, now: float) -> list[InFlightRequest]:
        """Remove and return the requests that expired without a report."""
        expired = self._ledger.expire(now)
        for request in expired:
            self._uncache_unless_prefilled(request)
        return expired

    def expire_peers(self, now: float) -> None:
        """Remove the load of replicas without a recent report."""
        self._update_peers(self._peers.expire(now))

    def adopt(self, now: float, pool: Pool) -> set[str]:
        """Apply a new version of the pool; return the members that did not restart.

        A member with the same id but another address or incarnation has restarted: it keeps its keys, but its cache is
        empty.
        """
        previous, instances = self._pool, self._instances
        self._pool = pool
        self._limits = _load_limits(pool)
        self._share_after_s = _SHARE_AFTER * min(pool.slo.ttft_s, pool.routing.queue.max_wait_s)
        self._stall_s = pool.routing.rebalance.decode_stall_s
        self.shares.credit_tokens = _credit_tokens(pool)
        self._membership = Membership(pool)
        known = {member.id: (member.endpoint, member.incarnation) for member in previous.members}
        stayed = {member.id for member in pool.members if known.get(member.id) == (member.endpoint, member.incarnation)}
        if pool.routing.prefix.block_tokens != previous.routing.prefix.block_tokens:
            self._tree, instances = PrefixTree(), {}
        indexes = {member: instance.index for member, instance in instances.items()}
        for member in indexes.keys() - stayed:
            indexes.pop(member).clear()
        for index in indexes.values():
            index.resize(_capacity_blocks(pool))
        self._instances = {
            member.id: self._instance(member, indexes[member.id] if member.id in indexes else self._new_index())
            for member in pool.members
        }
        self._ledger.set_prior(pool.engine.prefill_tokens_per_second)
        for member in self._membership.members:
            # others_changed also outdates every summary, because the new version of the pool may have other settings.
            self._ledger.loads[member].others_changed(partial(self._peers.load, member))
        self._update_suspended(now)
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
        self._update_peers(self._peers.hear(said_s, peer, loads))

    def on_placement(self, placement: Placement) -> None:
        """Record the endpoint to which another replica sent a prompt, up to the blocks of the longest prompt."""
        member = self._membership.at(placement.endpoint)
        if member is not None:
            longest = self._pool.engine.max_model_len // self._pool.routing.prefix.block_tokens
            self._instances[member.id].index.add(placement.hashes[: min(longest, MAX_BLOCKS)])

    def own_loads(self, now: float) -> dict[str, SharedLoad]:
        """Return this replica's load per member for the other replicas, without idle members."""
        loads = {}
        for member, load in self._ledger.loads.items():
            load.end_overdue(now)
            if load.working or load.queue:
                loads[member] = SharedLoad(
                    pending_prefill_tokens=load.prefills.tokens + load.queue.tokens,
                    backlog_s=load.prefills.backlog_s(now, self._stall_s),
                    held_s=load.queue.compute_s,
                    in_flight=load.working,
                    active_kv_tokens=load.kv.tokens,
                )
        return loads

    def statuses(self) -> tuple[EndpointStatus, ...]:
        """Return the status of every member in this router."""
        return tuple(self._status(member) for member in self._membership.members.values())

    def _succeeded(self, now: float, member: str) -> None:
        self._ledger.loads[member].suspension.succeeded()
        if member in self._membership.suspended:
            self._update_suspended(now)

    def _update_suspended(self, now: float) -> None:
        """Remove suspended members from the rings, and add resumed members again."""
        until_s = {
            member: load.suspension.until_s
            for member, load in self._ledger.loads.items()
            if load.suspension.until_s is not None
            and load.suspension.until_s > now
            and member in self._membership.members
        }
        self._resume_s = min(until_s.values(), default=None)
        if until_s.keys() != self._membership.suspended:
            self._membership.suspend(until_s)

    def _update_peers(self, members: set[str]) -> None:
        for member in members & self._membership.members.keys():
            self._ledger.loads[member].others_changed(partial(self._peers.load, member))

    def _uncache_unless_prefilled(self, request: InFlightRequest) -> None:
        """Remove the blocks of an aborted or failed request from the index, unless its prefill ended.

        A failing engine must not receive the next request because of blocks that it never cached.
        """
        if not request.prefilled:
            self._uncache(request.member, request.chain, request.matched_tokens)

    def _uncache(self, member: str, chain: BlockChain, matched_tokens: int) -> None:
        if member in self._instances:
            self._instances[member].index.cut(chain.cacheable, matched_tokens // chain.block_tokens)

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

    def _new_index(self) -> PrefixIndex:
        return PrefixIndex(_capacity_blocks(self._pool), self._tree)

    def _instance(self, member: Member, index: PrefixIndex) -> Instance:
        load = self._ledger.loads[member.id]
        return Instance(member=member, endpoint=member.endpoint, state=member.state.value, load=load, index=index)

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
        )


def _credit_tokens(pool: Pool) -> int:
    """Return the prompt tokens that the pool computes within the SLO."""
    return round(pool.slo.ttft_s * pool.engine.prefill_tokens_per_second) * len(pool.members)


def _capacity_blocks(pool: Pool) -> int:
    return pool.engine.cache_tokens // pool.routing.prefix.block_tokens


def _load_limits(pool: Pool) -> LoadLimits:
    queue, tokens = pool.routing.queue, pool.engine.max_model_len
    longest_s = PrefillModel(pool.engine.prefill_tokens_per_second).speed.compute_s(tokens, 0)
    return LoadLimits(
        backlog_s=queue.dispatch_window_s + longest_s,
        held_s=queue.max_wait_s,
        max_held=queue.max_held,
        prompt_tokens=tokens,
    )
