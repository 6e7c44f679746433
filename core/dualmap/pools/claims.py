"""Decides which pool gets a model name that several pools claim: the oldest one.

A request names only its model, so a name can lead to only one pool. The router serves by this rule, and the operator
reports a lost claim in the status of the pool. Both use this module, so that they agree.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from dualmap.pools.pool import Pool


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimant:
    """A pool that claims names: ``pool`` is its ``namespace/name``, ``created`` its unparsed creationTimestamp."""

    pool: str
    created: str
    names: tuple[str, ...]

    @classmethod
    def of(cls, pool: Pool, created: str) -> Self:
        """Return what ``pool`` claims: its model's name, aliases and adapters."""
        return cls(pool=pool.id, created=created, names=pool.model.names)


@dataclass(frozen=True, slots=True, kw_only=True)
class LostClaim:
    """A ``name`` that ``pool`` claims but the older pool ``owner`` has."""

    pool: str
    name: str
    owner: str


def seniority(created: str, pool: str) -> tuple[str, str]:
    """Return the sort key that orders pools by age; ``namespace/name`` orders those of the same second."""
    return created, pool


def lost_claims(claimants: Iterable[Claimant]) -> tuple[LostClaim, ...]:
    """Return each claim to a name that an older claimant has, in the order of the claimants' age and of their names.

    Only the claimants of a name decide its owner, so pools that do not claim it may be left out.
    """
    owners: dict[str, str] = {}
    lost: list[LostClaim] = []
    for each in sorted(claimants, key=lambda claimant: seniority(claimant.created, claimant.pool)):
        for name in each.names:
            owner = owners.setdefault(name, each.pool)
            if owner != each.pool:
                lost.append(LostClaim(pool=each.pool, name=name, owner=owner))
    return tuple(lost)
