"""Who has a model name that two pools claim: the older pool, for routers and operator alike.

A request names only its model, so that a name can lead to one pool alone. ``extproc``'s ``pools.objects`` serves by
this rule, and the operator tells of it in the status of the pool that lost: both decide here, so that they agree on
pools that both have read.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from dualmap.pools.pool import Pool


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimant:
    """A pool that claims names: ``pool`` is its ``namespace/name``, ``created`` its creationTimestamp as it stands."""

    pool: str
    created: str
    names: tuple[str, ...]

    @classmethod
    def of(cls, pool: Pool, created: str) -> Self:
        """Return what ``pool`` claims: its model's name, aliases and adapters."""
        return cls(pool=pool.id, created=created, names=pool.model.names)


@dataclass(frozen=True, slots=True, kw_only=True)
class LostClaim:
    """A ``name`` that ``pool`` claims in vain, since the older pool ``owner`` has it."""

    pool: str
    name: str
    owner: str


def seniority(created: str, pool: str) -> tuple[str, str]:
    """Return by what pools are sorted, the oldest first; of two made in the same second, by ``namespace/name``."""
    return created, pool


def lost_claims(claimants: Iterable[Claimant]) -> tuple[LostClaim, ...]:
    """Return each claim to a name that an older claimant has, in the order of the claimants' age and of their names.

    Who has a name depends on those alone who claim it: others may be left out.
    """
    owners: dict[str, str] = {}
    lost: list[LostClaim] = []
    for each in sorted(claimants, key=lambda claimant: seniority(claimant.created, claimant.pool)):
        for name in each.names:
            owner = owners.setdefault(name, each.pool)
            if owner != each.pool:
                lost.append(LostClaim(pool=each.pool, name=name, owner=owner))
    return tuple(lost)
