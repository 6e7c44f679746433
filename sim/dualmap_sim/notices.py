"""Members that must stop at a known time: the events of a run, and what the requests lost.

The member's engine fails at that time. What the routers know before differs: nothing, that the member drains, or also
when it leaves.
"""

from collections.abc import Collection, Iterable, Sequence
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

    def events(self, pool: Pool, reaction: Reaction, *, among: Sequence[Event] = ()) -> tuple[Event, ...]:
        """Return the events of the notice ``among`` others; the routers learn of the members' end at once.

        The others are in order of time, and ``pool`` is the pool before them. Members that stopped do not return.
        """
        changes = [event for event in among if isinstance(event, PoolChange)]
        others = [event for event in among if not isinstance(event, PoolChange)]
        leave_at_s = self.leave_at_s
        present = pool_at(pool, [event for event in changes if event.at_s < leave_at_s], leave_at_s).members
        times_s = [leave_at_s] if reaction is Reaction.NOTHING else [self.at_s, leave_at_s]
        seen: list[Event] = [
            PoolChange(at_s=each.at_s, pool=self._seen(each.pool, each.at_s, reaction))
            for each in [*changes, *(PoolChange(at_s=at_s, pool=pool_at(pool, changes, at_s)) for at_s in times_s)]
        ]
        kept = [each for each in others if each.at_s < leave_at_s or each.member not in self.members]
        fails = [Fail(at_s=leave_at_s, member=each.id) for each in present if each.id in self.members]
        # A member fails before it is removed.
        return tuple(sorted([*fails, *kept, *seen], key=lambda event: (event.at_s, not isinstance(event, Fail))))

    def _seen(self, pool: Pool, at_s: float, reaction: Reaction) -> Pool:
        """Return a pool as the routers see it at ``at_s``: its members drain from the notice on, and then are gone."""
        if at_s >= self.leave_at_s:
            return replace(pool, members=tuple(each for each in pool.members if each.id not in self.members))
        if at_s < self.at_s or reaction is Reaction.NOTHING:
            return pool
        leave_at_s = self.leave_at_s if reaction is Reaction.NOTICE else None
        told = tuple(
            replace(each, state=MemberState.DRAINING, leave_at_s=leave_at_s) if each.id in self.members else each
            for each in pool.members
        )
        return replace(pool, members=told)


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """What a run lost: requests whose member stopped, those of them with a first token, and recomputed tokens."""

    failed: int
    cut: int
    recomputed_tokens: int


def pool_at(pool: Pool, events: Iterable[Event], at_s: float) -> Pool:
    """Return the pool at a time of a run that begins with ``pool`` and has ``events`` in order of time."""
    for event in events:
        if isinstance(event, PoolChange) and event.at_s <= at_s:
            pool = event.pool
    return pool


def losses(records: Sequence[Record], *, from_s: float, block_tokens: int) -> Losses:
    """Return what a run lost. Tokens count for the requests that arrived at ``from_s`` or later."""
    failed = [each for each in records if each.failed]
    return Losses(
        failed=len(failed),
        cut=sum(each.first_token_s is not None for each in failed),
        recomputed_tokens=recomputed_tokens(records, from_s=from_s, block_tokens=block_tokens),
    )


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
