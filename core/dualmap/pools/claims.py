"""Decides which pool gets a model name that several pools claim: the oldest pool of the namespace that may have it.

A request contains only a model name, so a name must map to one pool. The router applies this rule, and the operator
reports a lost claim in the pool's status. Router and operator both use this module and therefore agree.

A name can be reserved for a namespace (``dualmap.objects.reservations``). Pools of other namespaces then lose the name,
also while the reserving namespace has no pool with this name.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

from dualmap.pools.pool import Pool


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimant:
    """A pool that claims names: ``pool`` is its ``namespace/name``, ``created`` its creationTimestamp as text."""

    pool: str
    created: str
    names: tuple[str, ...]

    @classmethod
    def of(cls, pool: Pool, created: str) -> Self:
        """Return the claims of ``pool``: its model's name, aliases and adapters."""
        return cls(pool=pool.id, created=created, names=pool.model.names)


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


def lost_claims(claimants: Iterable[Claimant], reserved: Mapping[str, str]) -> tuple[LostClaim, ...]:
    """Return each lost claim, ordered by the claimant's age, then by its order of names.

    ``reserved`` contains the namespace of each reserved name. The result for a name depends only on its reservation and
    on the claimants of that name, so all other pools may be omitted.
    """
    owners: dict[str, str] = {}
    lost: list[LostClaim] = []
    for each in sorted(claimants, key=lambda claimant: seniority(claimant.created, claimant.pool)):
        foreign = foreign_names(each.pool, each.names, reserved)
        for name in each.names:
            if name in foreign:
                lost.append(LostClaim(pool=each.pool, name=name, owner=reserved[name], reserved=True))
                continue
            owner = owners.setdefault(name, each.pool)
            if owner != each.pool:
                lost.append(LostClaim(pool=each.pool, name=name, owner=owner))
    return tuple(lost)
