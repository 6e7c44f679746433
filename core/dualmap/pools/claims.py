"""Decides which pool gets a model name that several pools claim: the oldest pool of the namespace that may have it.

A request contains only a model name, so a name must map to one pool. The router applies this rule, and the operator
reports a lost claim in the pool's status. Router and operator both use this module and therefore agree.

A name can be reserved for a namespace (``dualmap.objects.reservations``). Pools of other namespaces then lose the name,
also while the reserving namespace has no pool with this name.

A pool that prefills for other pools of its namespace (``spec.prefillPool``) claims no names: clients address the other
pools.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

from dualmap.pools.pool import Pool


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimant:
    """A pool that claims names: ``pool`` is its ``namespace/name``, ``created`` its creationTimestamp as text.

    ``prefill_pool`` is the ``namespace/name`` of the pool that it names to prefill for it; empty for none.
    """

    pool: str
    created: str
    names: tuple[str, ...]
    prefill_pool: str = ""

    @classmethod
    def of(cls, pool: Pool, created: str) -> Self:
        """Return the claims of ``pool``: its model's name, aliases and adapters."""
        prefill_pool = f"{pool.namespace}/{pool.prefill_pool}" if pool.prefill_pool else ""
        return cls(pool=pool.id, created=created, names=pool.model.names, prefill_pool=prefill_pool)


@dataclass(frozen=True, slots=True, kw_only=True)
class LostClaim:
    """A ``name`` that ``pool`` claims but that belongs to the older pool ``owner``.

    If the name is ``reserved``, ``owner`` is the namespace that the name is reserved for.
    """

    pool: str
    name: str
    owner: str
    reserved: bool = False


def seniority(created: str, pool: str) -> tuple[str, str]:
    """Return the sort key that orders pools by age; ``namespace/name`` orders pools created in the same second."""
    return created, pool


def foreign_names(pool: str, names: Iterable[str], reserved: Mapping[str, str]) -> tuple[str, ...]:
    """Return the ``names`` of a pool (``namespace/name``) that are reserved for other namespaces."""
    namespace = pool.partition("/")[0]
    return tuple(name for name in names if reserved.get(name, namespace) != namespace)


def prefill_problem(claimant: Claimant, pools: Mapping[str, Claimant]) -> str:
    """Return why the pool that ``claimant`` names cannot prefill for it; empty if it can, or if none is named.

    ``pools`` are all pools by ``namespace/name``.
    """
    if not claimant.prefill_pool:
        return ""
    name, prefill = claimant.prefill_pool.partition("/")[2], pools.get(claimant.prefill_pool)
    if prefill is None:
        return f"pool {name} does not exist in this namespace, or is not valid"
    if prefill.pool == claimant.pool:
        return f"pool {name} is this pool itself"
    if prefill.names[:1] != claimant.names[:1]:
        return f"pool {name} has another model"
    return f"pool {name} has a prefill pool of its own" if prefill.prefill_pool else ""


def prefill_pools(pools: Mapping[str, Claimant]) -> frozenset[str]:
    """Return the pools (``namespace/name``) that prefill for others of ``pools``."""
    return frozenset(
        each.prefill_pool for each in pools.values() if each.prefill_pool and not prefill_problem(each, pools)
    )


def addressed_pools(pools: Iterable[Pool]) -> tuple[Pool, ...]:
    """Return the pools that clients address: those that prefill for no other of ``pools``."""
    pools = tuple(pools)
    prefilling = prefill_pools({pool.id: Claimant.of(pool, "") for pool in pools})
    return tuple(pool for pool in pools if pool.id not in prefilling)


def lost_claims(claimants: Iterable[Claimant], reserved: Mapping[str, str]) -> tuple[LostClaim, ...]:
    """Return each lost claim, ordered by the claimant's age, then by its order of names.

    ``reserved`` contains the namespace of each reserved name. The result for a name depends only on its reservation, on
    the claimants of that name, and on the pools that these prefill for, so all other pools may be omitted.
    """
    by_pool = {each.pool: each for each in claimants}
    prefilling = prefill_pools(by_pool)
    owners: dict[str, str] = {}
    lost: list[LostClaim] = []
    for each in sorted(by_pool.values(), key=lambda claimant: seniority(claimant.created, claimant.pool)):
        if each.pool in prefilling:
            continue
        foreign = foreign_names(each.pool, each.names, reserved)
        for name in each.names:
            if name in foreign:
                lost.append(LostClaim(pool=each.pool, name=name, owner=reserved[name], reserved=True))
                continue
            owner = owners.setdefault(name, each.pool)
            if owner != each.pool:
                lost.append(LostClaim(pool=each.pool, name=name, owner=owner))
    return tuple(lost)
