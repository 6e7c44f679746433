"""Members that must stop at a known time: the events of a run, and what the requests lost.

The member's engine fails at that time. What the routers know before differs: nothing, that the member drains, or also
when it leaves.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from dualmap.pools.pool import MemberState, Pool
from dualmap_sim.events import Event, Fail, PoolChange
from dualmap_sim.records import Record


class Reaction(StrEnum):
    """What the routers know during a notice: nothing, that the members drain, or the time at which they leave."""

    NOTHING = "nothing"
    DRAIN = "drain"
    NOTICE = "notice"


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """A notice of ``notice_s`` seconds for ``members``, given at ``at_s``."""

    at_s: float
    notice_s: float
    members: frozenset[str]

    @property
    def leave_at_s(self) -> float:
        """The time at which the members' engines fail."""
        return self.at_s + self.notice_s

    def events(self, pool: Pool, reaction: Reaction) -> tuple[Event, ...]:
        """Return the events of the notice; the routers learn of the members' end at once."""
        staying = tuple(each for each in pool.members if each.id not in self.members)
        fails = tuple(Fail(at_s=self.leave_at_s, member=each) for each in sorted(self.members))
        end: tuple[Event, ...] = (*fails, PoolChange(at_s=self.leave_at_s, pool=replace(pool, members=staying)))
        if reaction is Reaction.NOTHING:
            return end
        leave_at_s = self.leave_at_s if reaction is Reaction.NOTICE else None
        told = tuple(
            replace(each, state=MemberState.DRAINING, leave_at_s=leave_at_s) if each.id in self.members else each
            for each in pool.members
        )
        return (PoolChange(at_s=self.at_s, pool=replace(pool, members=told)), *end)


def recomputed_tokens(records: Sequence[Record], *, from_s: float, block_tokens: int) -> int:
    """Return the tokens that engines computed although some engine had computed them before.

    These are prompt tokens of the requests that arrived at ``from_s`` or later, and those of streams that continued.
    ``block_tokens`` is the engines' block length.
    """
    computed: set[int] = set()
    recomputed = sum(each.recomputed_tokens for each in records)
    prefilled = [(each.prefilled_s, each) for each in records if each.prefilled_s is not None]
    for _, record in sorted(prefilled, key=lambda each: each[0]):
        work = record.arrival.work
        if record.arrival.at_s >= from_s:
            known_tokens = min(_leading(work.blocks, computed) * block_tokens, work.prompt_tokens)
            recomputed += max(0, known_tokens - record.cached_tokens - record.pulled_tokens)
        computed.update(work.blocks)
    return recomputed


def _leading(blocks: Sequence[int], among: Collection[int]) -> int:
    """Return how many leading blocks are ``among`` the given ones."""
    return next((position for position, block in enumerate(blocks) if block not in among), len(blocks))
