"""What this router knows of a pool's members: who may be picked, what each holds, owes and would take.

``router`` asks it for candidates and tells it what became of requests; the parts (membership, prefix indexes, ledger,
peers) know nothing of each other.
"""

from collections.abc import Mapping
from functools import partial
from weakref import WeakKeyDictionary

from dualmap.fleet.ledger import Ledger
from dualmap.fleet.load import MemberLoad
from dualmap.fleet.prefix_index import PrefixIndex, PrefixTree
from dualmap.fleet.view import Everyone, Instance, Roster, View
from dualmap.keys.membership import Membership
from dualmap.keys.rings import DualRing
from dualmap.pools.pool import Member, Pool
from dualmap.prompts.blocks import BlockChain
from dualmap.replicas.news import Placement, SharedLoad
from dualmap.replicas.peers import Peers
from dualmap.requests import EndpointStatus

# What requests generate before any has ended, in tokens, and how much each one that ends counts for the mean.
_OUTPUT_TOKENS = 200.0
_OUTPUT_WEIGHT = 0.02
# Room is kept for half as much again as the mean, since a sum of outputs varies; measured in docs/evaluation.md.
_OUTPUT_MARGIN = 1.5
# A window that opens by passing time opens at a sum of floats.
_WINDOW_SLACK_S = 1e-6


class Fleet:
    """The members of one pool, as this router knows them."""

    def __init__(self, pool: Pool) -> None:
        self.membership = Membership(pool)
        self.ledger = Ledger(pool.engine.prefill_tokens_per_second)
        self.peers = Peers()
        self.resume_s: float | None = None
        """When the first of the suspended members may be tried again."""
        self._output_tokens = _OUTPUT_TOKENS
        self._pool = pool
        self._stall_s = pool.routing.rebalance.decode_stall_s
        self._window_s = pool.routing.queue.dispatch_window_s + _WINDOW_SLACK_S
        self._tree = PrefixTree()
        self._instances = {member.id: self._instance(member, self._new_index()) for member in pool.members}
        self._rosters = WeakKeyDictionary[DualRing, Roster]()

    def adopt(self, now: float, pool: Pool) -> set[str]:
        """Take a new version of the pool; return the members that are where they were.

        Another address or incarnation under the same id is a restarted instance: it keeps its keys, but its cache is
        empty.
        """
        previous, instances = self._pool, self._instances
        self._pool = pool
        self._stall_s = pool.routing.rebalance.decode_stall_s
        self._window_s = pool.routing.queue.dispatch_window_s + _WINDOW_SLACK_S
        self.membership = Membership(pool)
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
        self.ledger.set_prior(pool.engine.prefill_tokens_per_second)
        for member in self.membership.members:
            # This also has every standing made anew, by the rules of the new version.
            self.ledger.load(member).peers_spoke(partial(self.peers.load, member))
        self.update_suspended(now)
        return stayed

    def endpoint(self, member: str) -> str | None:
        """Return where a member is, None when it is gone."""
        instance = self._instances.get(member)
        return None if instance is None else instance.endpoint

    def view(self, now: float, chain: BlockChain) -> View:
        """Return the members as they stand towards a prompt."""
        return View(now, chain, self._instances, self._tree, stall_s=self._stall_s)

    def everyone(self, view: View, ring: DualRing) -> Everyone:
        """Return all members of a ring as they stand towards the view's prompt."""
        return Everyone(view, partial(self._roster, view.now, ring))

    def backlog_s(self, now: float, member: str) -> float:
        """Return how many seconds of prefill are handed over to a member and not yet seen to end."""
        load = self.ledger.load(member)
        load.settle(now)
        return load.backlog_s(now, self._stall_s)

    def is_open(self, now: float, member: str) -> bool:
        """Whether a member's dispatch window is open: what was handed over will not keep it busy for longer."""
        return self.backlog_s(now, member) <= self._window_s

    def has_room(self, member: str, prompt_tokens: int) -> bool:
        """Whether a prompt fits into a member's KV memory now; always where nobody said how large that is."""
        kv_tokens, output_tokens = self._pool.engine.kv_tokens, _OUTPUT_MARGIN * self._output_tokens
        return kv_tokens is None or self.ledger.load(member).has_room(
            prompt_tokens, kv_tokens, output_tokens=output_tokens
        )

    def may_take(self, now: float, member: str, prompt_tokens: int) -> bool:
        """Whether a prompt may be handed over to a member now."""
        return self.is_open(now, member) and self.has_room(member, prompt_tokens)

    def generated(self, output_tokens: int) -> None:
        """Learn how much requests generate."""
        self._output_tokens += _OUTPUT_WEIGHT * (output_tokens - self._output_tokens)

    def queue_s(self, now: float, member: str) -> float:
        """Return how long a member would need to come to a request that is placed there now."""
        return self.ledger.load(member).queue_s(now, self._stall_s)

    def retry_after_s(self, now: float, member: str | None) -> float | None:
        """Return when a request that is refused may fare better, None where nobody knows.

        Those who wait for ``member`` now are served or refused by then; where the pool has no member at all, one that
        is asked for may have come.
        """
        max_wait_s = self._pool.routing.queue.max_wait_s
        if member is not None:
            return min(self.queue_s(now, member), max_wait_s)
        return None if self.membership.size else max_wait_s

    def will_hold(self, member: str, chain: BlockChain) -> None:
        """Record that a member caches a prompt, or is about to; nothing happens when it is gone."""
        if member in self._instances:
            self._instances[member].index.add(chain.cacheable)

    def take_back(self, member: str, chain: BlockChain, matched_tokens: int) -> None:
        """Record that a member never computed a prompt it was to; the ``matched_tokens`` it held before stay."""
        if member in self._instances:
            self._instances[member].index.cut(chain.cacheable, matched_tokens // chain.block_tokens)

    def placed_elsewhere(self, placement: Placement) -> None:
        """Record where another replica sent a prompt."""
        member = self.membership.at(placement.endpoint)
        if member is not None:
            self._instances[member.id].index.add(placement.hashes)

    def failed(self, now: float, member: str, dispatched_s: float) -> None:
        """Count a request that its instance failed, to which it was handed over at ``dispatched_s``."""
        if self.ledger.load(member).failed(now, dispatched_s):
            self.update_suspended(now)

    def succeeded(self, now: float, member: str) -> None:
        """Take note that an instance did what it was asked."""
        load = self.ledger.load(member)
        load.succeeded()
        if member in self.membership.suspended:
            self.update_suspended(now)

    def resume(self, now: float) -> None:
        """Let those members into the rings again that have been suspended for long enough."""
        if self.resume_s is not None and now >= self.resume_s:
            self.update_suspended(now)

    def update_suspended(self, now: float) -> None:
        """Leave the members out of the rings that are suspended now."""
        until_s = {
            member: load.suspended_until_s
            for member, load in self.ledger.items()
            if load.suspended_until_s is not None and load.suspended_until_s > now and member in self.membership.members
        }
        self.resume_s = min(until_s.values(), default=None)
        if until_s.keys() != self.membership.suspended:
            self.membership.suspend(until_s)

    def hear(self, said_s: float, peer: str, loads: Mapping[str, SharedLoad]) -> None:
        """Take another replica's share of the members' load."""
        for member in self.membership.members.keys() & loads:
            # Not what it holds for the member: that disturbs nobody.
            if loads[member].backlog_s:
                self.ledger.load(member).peer_busy(said_s)
        self._take_peers(self.peers.hear(said_s, peer, loads))

    def expire_peers(self, now: float) -> None:
        """Forget the load of replicas that have fallen silent."""
        self._take_peers(self.peers.expire(now))

    def shares(self, now: float) -> dict[str, SharedLoad]:
        """Return this replica's own share of each member's load, where it has any."""
        shares = {}
        for member, load in self.ledger.items():
            load.settle(now)
            if load.working or load.held:
                shares[member] = SharedLoad(
                    pending_prefill_tokens=load.pending_prefill_tokens + load.held.tokens,
                    backlog_s=max(0.0, load.backlog_s(now, self._stall_s) - load.peers.backlog_s),
                    held_s=load.held.compute_s,
                    in_flight=load.working,
                    active_kv_tokens=load.active_kv_tokens,
                )
        return shares

    def statuses(self) -> tuple[EndpointStatus, ...]:
        """Return every member as this router knows it."""
        return tuple(self._status(member) for member in self.membership.members.values())

    def _take_peers(self, members: set[str]) -> None:
        for member in members & self.membership.members.keys():
            self.ledger.load(member).peers_spoke(partial(self.peers.load, member))

    def _roster(self, now: float, ring: DualRing) -> Roster:
        """Return a ring's instances, with their standings up to date."""
        self.ledger.update(now, self._stall_s)
        roster = self._rosters.get(ring)
        if roster is None:
            roster = self._rosters[ring] = Roster(tuple(self._instances[member.id] for member in ring.members))
        return roster

    def _new_index(self) -> PrefixIndex:
        return PrefixIndex(_capacity_blocks(self._pool), self._tree)

    def _instance(self, member: Member, index: PrefixIndex) -> Instance:
        load = self.ledger.load(member.id)
        return Instance(member=member, endpoint=member.endpoint, state=member.state.value, load=load, index=index)

    def _status(self, member: Member) -> EndpointStatus:
        load: MemberLoad = self.ledger.load(member.id)
        return EndpointStatus(
            id=member.id,
            endpoint=member.endpoint,
            state=member.state.value,
            weight=member.weight,
            in_flight=load.in_flight,
            held=len(load.held),
            pending_prefill_tokens=load.pending_prefill_tokens,
            held_prefill_tokens=load.held.tokens,
            active_kv_tokens=load.active_kv_tokens,
            indexed_blocks=len(self._instances[member.id].index),
            prefill_tokens_per_second=load.speed.tokens_per_second,
            solo_tokens_per_second=load.solo_tokens_per_second,
            suspended=member.id in self.membership.suspended,
        )


def _capacity_blocks(pool: Pool) -> int:
    return pool.engine.cache_tokens // pool.routing.prefix.block_tokens
