"""Decides which pool gets a model name that several pools claim: the oldest one.

A request contains only a model name, so a name must map to one pool. The router applies this rule, and the operator
reports a lost claim in the pool's status. Router and operator both use this module and therefore agree.
"""

from collections.abc import Iterable
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
    """A ``name`` that ``pool`` claims but that belongs to the older pool ``owner``."""

    pool: str
    name: str
    owner: str


def seniority(created: str, pool: str) -> tuple[str, str]:
    """Return the sort key that orders pools by age; ``namespace/name`` orders pools created in the same second."""
    return created, pool


def lost_claims(claimants: Iterable[Claimant]) -> tuple[LostClaim, ...]:
    """Return each claim to a name of an older claimant, ordered by the claimant's age, then by its order of names.

    The result for a name depends only on the claimants of that name, so all other pools may be omitted.
    """
    owners: dict[str, str] = {}
    lost: list[LostClaim] = []
    for each in sorted(claimants, key=lambda claimant: seniority(claimant.created, claimant.pool)):
        for name in each.names:
            owner = owners.setdefault(name, each.pool)
            if owner != each.pool:
                lost.append(LostClaim(pool=each.pool, name=name, owner=owner))
    return tuple(lost)
