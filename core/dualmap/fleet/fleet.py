"""The facade of a pool's fleet: which members may be picked, what each has cached, its load and its room.

The dispatcher and the chooser ask it for candidates, the router reports events to it. Its parts (membership, prefix
indexes, ledger, peers) do not know each other, and nothing outside this folder reaches them.
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
from dualmap.prompts.blocks import BlockChain
from dualmap.queue.request_queue import MemberQueue, QueuedRequest
from dualmap.replicas.peers import PEER_TTL_S, Peers
from dualmap.replicas.plausible import LoadLimits
from dualmap.replicas.update import Placement, SharedLoad
from dualmap.requests import EndpointStatus, Usage

# The expected output of a request in tokens before any has ended, and the weight of each one that ends in the mean.
_OUTPUT_TOKENS = 200.0
_OUTPUT_WEIGHT = 0.02
# The room for outputs is this many times their mean, since a sum of outputs varies. Exploratory simulations, which are
# not recorded, led to the value.
_OUTPUT_MARGIN = 1.5
# A request that has waited for this part of its SLO (or of the longest wait) may use this replica's share of a member.
_SHARE_AFTER = 0.5
# A window that opens by time alone opens at a sum of floats.
_WINDOW_SLACK_S = 1e-6


class Fleet:
    """The members of one pool, as this router knows them."""

    def __init__(self, pool: Pool) -> None:
        self._membership = Membership(pool)
        self._ledger = Ledger(pool.engine.prefill_tokens_per_second)
        self._peers = Peers()
        # When the first of the suspended members may be tried again.
        self._resume_s: float | None = None
        self._output_tokens = _OUTPUT_TOKENS
        self._pool = pool
        self._limits = _load_limits(pool)
        self._share_after_s = _SHARE_AFTER * min(pool.slo.ttft_s, pool.routing.queue.max_wait_s)
        self._stall_s = pool.routing.rebalance.decode_stall_s
        self.window_s = pool.routing.queue.dispatch_window_s + _WINDOW_SLACK_S
        """A member takes requests while its backlog is within this dispatch window."""
        self._tree = PrefixTree()
        self._instances = {member.id: self._instance(member, self._new_index()) for member in pool.members}
        self._rosters = WeakKeyDictionary[DualRing, Roster]()

    # The members: which there are, and which may be picked.

    @property
    def size(self) -> int:
        """How many members take new keys, suspended ones included."""
        return self._membership.size

    @property
    def members(self) -> Collection[str]:
        """The ids of all members."""
        return self._membership.members.keys()

    @property
    def peers(self) -> int:
        """How many other replicas reported lately."""
        return len(self._peers)

    def ring(self, subset: frozenset[str] | None) -> DualRing:
        """Return the rings over the members that a request may use."""
        return self._membership.ring(subset)

    def endpoint(self, member: str) -> str | None:
        """Return a member's endpoint, or None when it has left."""
        instance = self._instances.get(member)
        return None if instance is None else instance.endpoint

    # What decisions ask of the members.

    def view(self, now: float, chain: BlockChain) -> View:
        """Return the members as they are towards a prompt."""
        return View(now, chain, self._instances, self._tree, stall_s=self._stall_s)

    def everyone(self, view: View, ring: DualRing) -> Everyone:
        """Return all members of a ring as they are towards the view's prompt."""
        return Everyone(view, partial(self._roster, view.now, ring))

    def backlog_s(self, now: float, member: str) -> float:
        """Return how many seconds of prefill were sent to a member and are not seen to have ended."""
        load = self._ledger.loads[member]
        load.end_overdue(now)
        return load.backlog_s(now, self._stall_s)

    def is_open(self, now: float, member: str, *, waited_s: float) -> bool:
        """Whether a member takes a request that has waited for ``waited_s``: its backlog is within the dispatch window.

        A request that has waited for long may use this replica's share of the window, whatever other replicas report.
        """
        if self.backlog_s(now, member) <= self.window_s:
            return True
        load = self._ledger.loads[member]
        return waited_s + _WINDOW_SLACK_S >= self._share_after_s and load.within_share(
            now, self._stall_s, self.window_s
        )

    def queue_s(self, now: float, member: str) -> float:
        """Return T_q of a member: the time until the prefill of a request placed there now would start."""
        return self._ledger.loads[member].queue_s(now, self._stall_s)

    def has_room(self, member: str, prompt_tokens: int, *, waited_s: float) -> bool:
        """Whether a prompt fits into a member's KV memory now; true if the size of that memory is unknown.

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

    def next_dispatch_s(self, *, after_s: float) -> float | None:
        """Return when time alone lets a queued request be dispatched, after ``after_s``; None if it takes an event."""
        window_s = self._pool.routing.queue.dispatch_window_s
        return self._ledger.dispatch_times.first_s(window_s, after_s=after_s, share_after_s=self._share_after_s)

    def retry_after_s(self, now: float, member: str | None) -> float | None:
        """Return when a rejected request has better chances, None if that is unknown.

        By then the requests that are queued for ``member`` now are served or rejected. If the pool has no member at
        all, one may have been started.
        """
        max_wait_s = self._pool.routing.queue.max_wait_s
        if member is not None:
            return min(self.queue_s(now, member), max_wait_s)
        return None if self.size else max_wait_s

    # What becomes of requests.

    def will_cache(self, member: str, chain: BlockChain) -> None:
        """Record that a member caches a prompt or will cache it. Does nothing if the member has left."""
        if member in self._instances:
            self._instances[member].index.add(chain.cacheable)

    def will_not_cache(self, request: QueuedRequest) -> None:
        """Record that a queued request's member will not compute its prompt; what was cached before stays."""
        self._uncache(request.member, request.request.chain, request.matched_tokens)

    def dispatched(self, now: float, queued: QueuedRequest) -> InFlightRequest:
        """Enter a request that is sent to its member now; return it as it is in flight."""
        request = queued.request
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
        """Move a request to the member that really serves it; return it and the member that it left.

        None when it is unknown, or is where it was sent.
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
        """Record that a request is alive; ignored when it is unknown."""
        self._ledger.heard(now, request_id)

    def first_token(self, now: float, request_id: str) -> InFlightRequest | None:
        """Release a request's pending prefill; None when it is unknown or was released before."""
        request = self._ledger.first_token(now, request_id)
        if request is not None:
            # The prompt is certainly cached, and used now. The index may have lost it to a request that was aborted.
            self.will_cache(request.member, request.chain)
            self._succeeded(now, request.member)
        return request

    def finished(self, now: float, request_id: str, usage: Usage | None) -> InFlightRequest | None:
        """Remove a request that ended as it should, and learn from it; None when it is unknown."""
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
        """Remove a request that was aborted or failed; None when it is unknown."""
        request = self._ledger.leave(now, request_id)
        if request is not None:
            self._uncache_unless_prefilled(request)
        return request

    def failed(self, now: float, member: str, dispatched_s: float) -> bool:
        """Count a request, sent at ``dispatched_s``, that its member failed; return whether the member is suspended."""
        if self._ledger.loads[member].suspension.failed(now, dispatched_s):
            self._update_suspended(now)
        return member in self._membership.suspended

    # Time, the pool, and the other replicas.

    def next_deadline(self) -> float | None:
        """Return when ``resume``, ``expire`` or ``expire_peers`` has something to do, or None."""
        times_s = (self._ledger.next_expiry(), self._peers.next_expiry(), self._resume_s)
        return min((each for each in times_s if each is not None), default=None)

    def resume(self, now: float) -> None:
        """Let members that were suspended for long enough take requests again."""
        if self._resume_s is not None and now >= self._resume_s:
            self._update_suspended(now)

    def expire(self, now: float) -> list[InFlightRequest]:
        """Remove and return the requests of which no report came for too long."""
        expired = self._ledger.expire(now)
        for request in expired:
            self._uncache_unless_prefilled(request)
        return expired

    def expire_peers(self, now: float) -> None:
        """Forget the load of replicas that no longer report."""
        self._update_peers(self._peers.expire(now))

    def adopt(self, now: float, pool: Pool) -> set[str]:
        """Take a new version of the pool; return the members that did not restart.

        Another address or incarnation under the same id is a restarted member: it keeps its keys, but its cache is
        empty.
        """
        previous, instances = self._pool, self._instances
        self._pool = pool
        self._limits = _load_limits(pool)
        self._share_after_s = _SHARE_AFTER * min(pool.slo.ttft_s, pool.routing.queue.max_wait_s)
        self._stall_s = pool.routing.rebalance.decode_stall_s
        self.window_s = pool.routing.queue.dispatch_window_s + _WINDOW_SLACK_S
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
            # The new version also outdates every summary, since it may have other rules.
            self._ledger.loads[member].others_changed(partial(self._peers.load, member))
        self._update_suspended(now)
        return stayed

    def forget_gone(self) -> None:
        """Forget the load of members that left the pool and have no request in flight or queued."""
        self._ledger.retain(set(self._membership.members))

    def on_loads(self, said_s: float, peer: str, loads: Mapping[str, SharedLoad], *, age_s: float) -> None:
        """Take another replica's load per member, as of ``said_s``; one that is too old is ignored.

        A load above the limits is reduced to the limits. The pool may know a member later than the other replica.
        """
        if age_s >= PEER_TTL_S:
            return
        clamp = self._limits.clamp
        loads = {member: clamp(load) for member, load in loads.items()}
        for member in self._membership.members.keys() & loads:
            # Only what it sent to the member: its queued requests disturb no prefill.
            if loads[member].backlog_s:
                self._ledger.loads[member].others.busy(said_s)
        self._update_peers(self._peers.hear(said_s, peer, loads))

    def on_placement(self, placement: Placement) -> None:
        """Record where another replica sent a prompt, of at most the longest prompt's blocks."""
        member = self._membership.at(placement.endpoint)
        if member is not None:
            longest = self._pool.engine.max_model_len // self._pool.routing.prefix.block_tokens
            self._instances[member.id].index.add(placement.hashes[:longest])

    def own_loads(self, now: float) -> dict[str, SharedLoad]:
        """Return this replica's load per member, where it has any, for the other replicas."""
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
        """Return every member as this router knows it."""
        return tuple(self._status(member) for member in self._membership.members.values())

    def _succeeded(self, now: float, member: str) -> None:
        self._ledger.loads[member].suspension.succeeded()
        if member in self._membership.suspended:
            self._update_suspended(now)

    def _update_suspended(self, now: float) -> None:
        """Take the members that are suspended now out of the rings, and put the others back."""
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
        """Take back what an aborted or failed request was to have cached.

        An engine that fails at once must not attract the next request by a cache that it never filled.
        """
        if not request.prefilled:
            self._uncache(request.member, request.chain, request.matched_tokens)

    def _uncache(self, member: str, chain: BlockChain, matched_tokens: int) -> None:
        if member in self._instances:
            self._instances[member].index.cut(chain.cacheable, matched_tokens // chain.block_tokens)

    def _roster(self, now: float, ring: DualRing) -> Roster:
        """Return a ring's instances, with their summaries up to date."""
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
