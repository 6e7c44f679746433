"""The members that a request may use, and their state for the request's prompt."""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from weakref import WeakKeyDictionary

from dualmap.engines.profiles import Profiles
from dualmap.engines.prompt_tokens import PromptTokens
from dualmap.fleet.caches import Caches
from dualmap.fleet.fetches import StoreTier
from dualmap.fleet.ledger import Ledger
from dualmap.fleet.listed_models import ListedModels
from dualmap.fleet.memory_waits import MemoryWaits
from dualmap.fleet.reported import ReportedCaches
from dualmap.fleet.view import Everyone, Instance, Roster, View
from dualmap.keys.membership import Membership
from dualmap.keys.rings import DualRing
from dualmap.kv_store.view import NO_MATCH, StoreMatch
from dualmap.pools.pool import Pool
from dualmap.prompts.blocks import BlockChain
from dualmap.queue.fair_shares import FairShares
from dualmap.queue.request_queue import MemberQueue
from dualmap.requests import Request


class Candidates:
    """The members of one pool that may be picked. The arguments after ``pool`` are of the same pool.

    ``epoch_s`` is the time since the epoch at which ``now`` is 0.
    """

    def __init__(
        self,
        pool: Pool,
        *,
        ledger: Ledger,
        profiles: Profiles,
        caches: Caches,
        reported: ReportedCaches,
        shares: FairShares,
        waits: MemoryWaits,
        epoch_s: float = 0.0,
    ) -> None:
        self._pool = pool
        self._ledger = ledger
        self._profiles = profiles
        self._caches = caches
        self._reported = reported
        self._shares = shares
        self._waits = waits
        self.membership = Membership(pool)
        """All members of the pool, and the rings over them."""
        self._epoch_s = epoch_s
        self._leaves_s = self._leaving_times()
        self.resume_s: float | None = min(self._leaves_s.values(), default=None)
        """The time at which the first suspension ends, or at which the first member must have left."""
        self._models = ListedModels(self.membership.members)
        self._specified_adapters = frozenset(pool.model.adapters)
        self._stall_s = pool.routing.rebalance.decode_stall_s
        self._instances = self._new_instances()
        self._rosters = WeakKeyDictionary[DualRing, Roster]()

    def specify(self, pool: Pool) -> None:
        """Take the adapters of a new version of the pool's specification."""
        self._specified_adapters = frozenset(pool.model.adapters)

    def adopt(self, pool: Pool) -> None:
        """Apply a new version of the pool, which ``caches`` and ``profiles`` already have."""
        self._pool = pool
        self._stall_s = pool.routing.rebalance.decode_stall_s
        self.membership = Membership(pool)
        self._leaves_s = self._leaving_times()
        self._instances = self._new_instances()
        self._waits.update(self._instances)
        self._models.adopt(self.membership.members, self._profiles.members)

    # The members that a request may use.

    @property
    def size(self) -> int:
        """The number of members that new keys may map to, including suspended members."""
        return self.membership.size

    def ring(self, subset: frozenset[str] | None) -> DualRing:
        """Return the two hash rings over the members that a request may use."""
        return self.membership.ring(subset)

    def rings(self, request: Request) -> tuple[DualRing, DualRing | None]:
        """Return the rings over the members that a request may use, and over those that it prefers (None: all).

        A request prefers members that have its adapter loaded. Members that are known to lack the adapter are left out
        if only engines say that the pool has the adapter. If the specification says so, they may load it on demand.
        """
        if not request.adapter:
            return self.rings_of_model(request.subset, request.model)
        of = self._models.of(request.adapter)
        lacking = frozenset[str]() if request.adapter in self._specified_adapters else of.lacking
        loaded = self.membership.ring_of(request.subset, of.absent) if of.absent != lacking else None
        return self.membership.ring(request.subset, lacking), loaded

    def rings_of_model(self, subset: frozenset[str] | None, model: str) -> tuple[DualRing, DualRing | None]:
        """Return the rings over the members for a name of the base model, and over those preferred (None: all).

        Members that are known not to list the name are left out if their type of engine rejects other names. Otherwise,
        they are only not preferred: most of these engines answer a request for any name.
        """
        lacking = self._models.of(model).lacking if model else frozenset[str]()
        if not lacking:
            return self.membership.ring(subset), None
        if self._pool.engine.checks_names:
            return self.membership.ring(subset, lacking), None
        return self.membership.ring(subset), self.membership.ring_of(subset, lacking)

    def adapter_state(self, adapter: str, member: str) -> str:
        """Return what is known of an adapter at a member, as the receipt says it; empty without an adapter."""
        return self._models.of(adapter).state(member) if adapter else ""

    def list_models(self, member: str, models: Collection[str]) -> None:
        """Set the models that a member lists; empty if its list is not known."""
        self._models.put(member, models)

    def update_left_out(self, now: float) -> None:
        """Remove suspended and asleep members from the rings, and add resumed members again.

        Also find the members whose time to leave has passed.
        """
        until_s = {
            member: load.suspension.until_s
            for member, load in self._ledger.loads.items()
            if load.suspension.until_s is not None
            and load.suspension.until_s > now
            and member in self.membership.members
        }
        ahead_s = [leaves_s for leaves_s in self._leaves_s.values() if leaves_s > now]
        self.resume_s = min((*until_s.values(), *ahead_s), default=None)
        asleep, known = self._profiles.asleep, self.membership
        departed = frozenset(member for member, leaves_s in self._leaves_s.items() if leaves_s <= now)
        if (frozenset(until_s), asleep, departed) != (known.suspended, known.asleep, known.departed):
            known.leave_out(suspended=until_s, asleep=asleep, departed=departed)

    def leaving(self, now: float, request: Request) -> tuple[tuple[str, float], ...]:
        """Return the members that leave at a known time and may still get a request, with the seconds until then.

        A member with weight 0 gets no new requests.
        """
        if not self._leaves_s:
            return ()
        left_out = self.membership.suspended | self.membership.asleep
        name = request.adapter or request.model
        if name:
            left_out |= self._models.of(name).lacking
        return tuple(
            (each.id, self._leaves_s[each.id] - now)
            for each in self._pool.members
            if self._leaves_s.get(each.id, now) > now
            and each.weight > 0
            and each.id not in left_out
            and (request.subset is None or each.endpoint in request.subset or each.address in request.subset)
        )

    # The members' state for a prompt.

    def endpoint(self, member: str) -> str | None:
        """Return a member's endpoint, or None if the member has left."""
        instance = self._instances.get(member)
        return None if instance is None else instance.endpoint

    def source(self, member: str) -> str:
        """Return the endpoint of a member from which others can fetch KV; empty if it has left, fails or sleeps."""
        known = self.membership
        if member in known.suspended or member in known.asleep or member in known.departed:
            return ""
        return self.endpoint(member) or ""

    def view(
        self,
        now: float,
        chain: BlockChain,
        *,
        client: int = 0,
        priority: int = 0,
        tokens: PromptTokens | None = None,
        stored: StoreMatch = NO_MATCH,
    ) -> View:
        """Return a view of the members for one prompt of a client."""
        overtakes = self._shares.has_rivals(client) or self._pool.objectives.priorities
        behind_s = partial(self._behind_s, client, priority) if overtakes else None
        reported = self._reported.matches(now, tokens, chain, self._caches.reuse_step)
        return View(
            now,
            chain,
            self._instances,
            self._caches.tree,
            stall_s=self._stall_s,
            reported=reported,
            behind_s=behind_s,
            stored=self.tier(chain, stored) if stored.tokens else None,
            waits=self._waits if self._waits.small else None,
        )

    def tier(self, chain: BlockChain, stored: StoreMatch) -> StoreTier | None:
        """Return what members can fetch of a prompt: from the pool's store or from each other; None if nothing.

        Engines always compute the last token of a prompt.
        """
        tokens = min(stored.tokens, chain.tokens - 1)
        if tokens <= 0 or not self._pool.fetches_kv:
            return None
        return StoreTier(tokens, self._ledger.fetches.token_s, stored.held_at)

    def keep(self, now: float) -> Sequence[Callable[[], None]]:
        """Return functions that take back the effects that views have on the members' loads from now on."""
        return self._ledger.keep(now)

    def everyone(self, view: View, ring: DualRing) -> Everyone:
        """Return all members of a ring for the view's prompt."""
        return Everyone(view, partial(self._roster, view.now, ring))

    def _behind_s(self, client: int, priority: int, queue: MemberQueue) -> float:
        return queue.behind_s(client, priority, self._shares.counter)

    def _roster(self, now: float, ring: DualRing) -> Roster:
        """Return a ring's instances with current summaries."""
        self._ledger.update(now, self._stall_s)
        roster = self._rosters.get(ring)
        if roster is None:
            roster = self._rosters[ring] = Roster(tuple(self._instances[member.id] for member in ring.members))
        return roster

    def _leaving_times(self) -> dict[str, float]:
        """Return the times at which members must have left, on the clock of ``now``."""
        return {each.id: each.leave_at_s - self._epoch_s for each in self._pool.members if each.leave_at_s is not None}

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
