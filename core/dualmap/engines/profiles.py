"""The latest profile of each member's engine, and the pool that results from them.

A pool's specification may leave values open. This module fills these values from the profiles. Where no engine says a
value, the specification's default stays.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Final

from dualmap.engines.profile import NO_PROFILE, EngineProfile
from dualmap.pools.pool import Member, Pool

DISCOVERED_LENGTH_MAX: Final = 2**20
"""The longest prompt of a pool that engines can set. A longer one needs a value in the specification."""
POOL_ADAPTERS_MAX: Final = 1024
"""The most discovered adapters of a pool."""
ADAPTER_KEPT_S: Final = 300.0
"""How long a pool serves an adapter after its engines no longer report it."""


@dataclass(frozen=True, slots=True)
class _Known:
    """A member's process, by endpoint and incarnation, and the last profile of its engine."""

    process: tuple[str, str]
    profile: EngineProfile


class Profiles:
    """The profiles of one pool's members."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._members: Mapping[str, Member] = {member.id: member for member in pool.members}
        self._known: dict[str, _Known] = {}
        self.asleep: frozenset[str] = frozenset()
        """The members whose engine sleeps."""
        self.adapters: tuple[str, ...] = ()
        """The adapters that engines serve or served until recently, in alphabetical order."""
        # The time since which no engine reports an adapter.
        self._lost_s: dict[str, float] = {}
        # The time at which ``adapters`` may change without another profile.
        self._adapters_due_s = inf

    def get(self, member: str) -> EngineProfile:
        """Return a member's profile; an empty profile if none is known."""
        known = self._known.get(member)
        return NO_PROFILE if known is None else known.profile

    def put(self, now: float, member: str, profile: EngineProfile) -> bool:
        """Store a member's profile; return False if the pool has no such member or asks no engine."""
        of = self._members.get(member)
        if of is None or not self._pool.engine.discovery.enabled:
            return False
        before = self.get(member)
        self._known[member] = _Known(_process(of), profile)
        if profile.adapters != before.adapters or now >= self._adapters_due_s:
            self._update_adapters(now)
        if bool(profile.asleep) != (member in self.asleep):
            self.asleep = self.asleep ^ {member}
        return True

    def adopt(self, pool: Pool) -> None:
        """Apply a new version of the specification; forget the profiles of members that left or restarted."""
        self._pool = pool
        self._members = {member.id: member for member in pool.members}
        if not pool.engine.discovery.enabled:
            self._known.clear()
            self._lost_s.clear()
            self.adapters = ()
        self._known = {
            member: known
            for member, known in self._known.items()
            if member in self._members and _process(self._members[member]) == known.process
        }
        # `&` with keys of a dictionary would return a mutable set.
        self.asleep = self.asleep.intersection(self._known)
        self._adapters_due_s = -inf

    @property
    def members(self) -> set[str]:
        """The members with a profile."""
        return set(self._known)

    def kv_tokens(self, member: str) -> int | None:
        """Return a member's KV memory in tokens; None if it is not known."""
        set_tokens = self._pool.engine.kv_tokens
        return self.get(member).kv_tokens if set_tokens is None else set_tokens

    def cache_tokens(self, member: str) -> int:
        """Return the tokens that a member keeps for reuse."""
        engine, found = self._pool.engine, self.get(member).cache_tokens
        return engine.cache_tokens if found is None or not engine.discovery.cache_tokens else found

    def complete(self) -> Pool:
        """Return the pool with the open values as its engines say them.

        The longest prompt and the largest cache count, because members may differ.
        """
        pool, profiles = self._pool, [known.profile for known in self._known.values()]
        engine, discovery = pool.engine, pool.engine.discovery
        if discovery.max_model_len:
            longest = _largest((each.max_model_len for each in profiles), engine.max_model_len)
            engine = replace(engine, max_model_len=min(longest, DISCOVERED_LENGTH_MAX))
        if discovery.cache_tokens:
            most = _largest((each.cache_tokens for each in profiles), engine.cache_tokens)
            engine = replace(engine, cache_tokens=most)
        named = frozenset(pool.model.names)
        adapters = pool.model.adapters + tuple(each for each in self.adapters if each not in named)
        return replace(pool, engine=engine, model=replace(pool.model, adapters=adapters))

    def _update_adapters(self, now: float) -> None:
        """Update the adapters: those that any engine reports, and those that were reported until recently.

        An engine that restarts or leaves takes its adapters with it. Requests for them must not fail in the meantime.
        Up to the limit, reported adapters have precedence over lost ones, and earlier adapters over new ones.
        """
        reported = {adapter for known in self._known.values() for adapter in known.profile.adapters}
        lost_s = {each: self._lost_s.get(each, now) for each in self.adapters if each not in reported}
        lost_s = {each: since_s for each, since_s in lost_s.items() if now < since_s + ADAPTER_KEPT_S}
        earlier = reported.intersection(self.adapters)
        served = [*earlier, *sorted(reported - earlier), *lost_s][:POOL_ADAPTERS_MAX]
        self._lost_s = {each: lost_s[each] for each in served if each in lost_s}
        self._adapters_due_s = min(self._lost_s.values(), default=inf) + ADAPTER_KEPT_S
        adapters = tuple(sorted(served))
        if adapters != self.adapters:
            self.adapters = adapters


def _process(member: Member) -> tuple[str, str]:
    return member.endpoint, member.incarnation


def _largest(values: Iterable[int | None], default: int) -> int:
    return max((each for each in values if each), default=default)
