"""An index of the model names that pools claim, so that a change triggers a reconcile of affected pools only.

``watches`` updates the index and ``gather`` reads it. Operator and routers use ``dualmap.pools.claims`` to decide which
pool has a name, so they agree on every pool with a valid spec. If a spec becomes invalid, each process keeps the names
that it read last. A process that starts with an invalid spec does not have these names (docs/operator.md).
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from dualmap.errors import PoolError
from dualmap.objects.pods import mapping_in, text_in
from dualmap.objects.pool_reader import read_pools
from dualmap.objects.reservations import can_be_reserved
from dualmap.pools.claims import Claimant, LostClaim, lost_claims, prefill_pools, prefill_problem
from dualmap_operator.observe.mirror import Key


class Claims:
    """The model names that pools claim, indexed by pool and by name."""

    def __init__(self) -> None:
        self._claimants: dict[Key, Claimant] = {}
        self._by_name: defaultdict[str, set[Key]] = defaultdict(set)
        # The pools that name a pool (``namespace/name``) as their prefill pool.
        self._users: defaultdict[str, set[Key]] = defaultdict(set)
        self._reserved: Mapping[str, str] = {}

    def changed(self, key: Key, before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> set[Key]:
        """Record a pool's change from ``before`` to ``after``; return the other pools that the change may affect.

        A pool with an invalid spec keeps its last claims, because routers keep using them. If the spec has been invalid
        since the operator started, the pool has no claims, as in a router started at that time.
        """
        was = self._claimants.get(key)
        if after is None:
            now = None
        elif before is None or _uid(before) != _uid(after):
            now = _claimant(after)
        elif before.get("spec") == after.get("spec"):
            return set()  # Only the status has changed; most updates are of this kind.
        else:
            now = _claimant(after) or was
        if now == was:
            return set()
        concerned = self._concerned(was)
        self._put(key, was, now)
        return (concerned | self._concerned(now)) - {key}

    def reserve(self, reserved: Mapping[str, str]) -> set[Key]:
        """Replace the reservations; return the pools that the change may affect."""
        before, self._reserved = self._reserved, reserved
        changed = {name for name, _ in before.items() ^ reserved.items()}
        return {key for name in changed for key in self._by_name.get(name, ())}

    def unreserved(self, key: Key) -> tuple[str, ...]:
        """Return the names that a pool has and that are not reserved yet."""
        mine = self._claimants.get(key)
        if mine is None:
            return ()
        users = [self._claimants[user] for user in self._users.get(mine.pool, ())]
        if mine.pool in prefill_pools({each.pool: each for each in (mine, *users)}):
            return ()
        lost = {each.name for each in self.lost(key)}
        return tuple(
            name for name in mine.names if name not in self._reserved and name not in lost and can_be_reserved(name)
        )

    def lost(self, key: Key) -> tuple[LostClaim, ...]:
        """Return the names that a pool claims but that belong to an older pool or to another namespace."""
        mine = self._claimants.get(key)
        if mine is None:
            return ()
        rivals = self._rivals(mine)
        users = {user for rival in rivals for user in self._users.get(self._claimants[rival].pool, ())}
        claimants = [self._claimants[each] for each in rivals | users]
        return tuple(lost for lost in lost_claims(claimants, self._reserved) if lost.pool == mine.pool)

    def prefill_problem(self, key: Key) -> str:
        """Return why a pool's prefill pool cannot prefill for it; empty if it can, or if the pool names none."""
        mine = self._claimants.get(key)
        if mine is None or not mine.prefill_pool:
            return ""
        named = self._claimants.get(_key(mine.prefill_pool))
        return prefill_problem(mine, {} if named is None else {named.pool: named})

    def _concerned(self, claimant: Claimant | None) -> set[Key]:
        """Return the pools that a change of ``claimant`` may affect: rivals, and those related by prefills."""
        if claimant is None:
            return set()
        concerned = self._rivals(claimant) | self._users.get(claimant.pool, set())
        prefill = self._claimants.get(_key(claimant.prefill_pool)) if claimant.prefill_pool else None
        return concerned if prefill is None else concerned | self._rivals(prefill)

    def _rivals(self, claimant: Claimant | None) -> set[Key]:
        """Return the pools that claim any name of ``claimant``."""
        if claimant is None:
            return set()
        return {key for name in claimant.names for key in self._by_name.get(name, ())}

    def _put(self, key: Key, was: Claimant | None, now: Claimant | None) -> None:
        for name in () if was is None else was.names:
            self._by_name[name].discard(key)
            if not self._by_name[name]:
                del self._by_name[name]
        if was is not None and was.prefill_pool:
            self._users[was.prefill_pool].discard(key)
            if not self._users[was.prefill_pool]:
                del self._users[was.prefill_pool]
        self._claimants.pop(key, None)
        if now is not None:
            self._claimants[key] = now
            if now.prefill_pool:
                self._users[now.prefill_pool].add(key)
            for name in now.names:
                self._by_name[name].add(key)


def _key(pool: str) -> Key:
    namespace, _, name = pool.partition("/")
    return namespace, name


def _claimant(document: Mapping[str, Any]) -> Claimant | None:
    """Return the claims of a pool, None if its spec cannot be read."""
    try:
        # The status is large and contains no claims.
        (pool,) = read_pools({name: value for name, value in document.items() if name != "status"})
    except PoolError:
        return None
    return Claimant.of(pool, text_in(mapping_in(document, "metadata"), "creationTimestamp"))


def _uid(document: Mapping[str, Any]) -> str:
    return text_in(mapping_in(document, "metadata"), "uid")
