"""The latest profile of each member's engine, and the pool that results from them.

A pool's specification may leave values open. This module fills these values from the profiles. Where no engine says a
value, the specification's default stays.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from dualmap.engines.profile import NO_PROFILE, EngineProfile
from dualmap.pools.pool import Member, Pool


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

    def get(self, member: str) -> EngineProfile:
        """Return a member's profile; an empty profile if none is known."""
        known = self._known.get(member)
        return NO_PROFILE if known is None else known.profile

    def put(self, member: str, profile: EngineProfile) -> bool:
        """Store a member's profile; return False if the pool has no such member or asks no engine."""
        of = self._members.get(member)
        if of is None or not self._pool.engine.discovery.enabled:
            return False
        self._known[member] = _Known(_process(of), profile)
        if bool(profile.asleep) != (member in self.asleep):
            self.asleep = self.asleep ^ {member}
        return True

    def adopt(self, pool: Pool) -> None:
        """Apply a new version of the specification; forget the profiles of members that left or restarted."""
        self._pool = pool
        self._members = {member.id: member for member in pool.members}
        if not pool.engine.discovery.enabled:
            self._known.clear()
        self._known = {
            member: known
            for member, known in self._known.items()
            if member in self._members and _process(self._members[member]) == known.process
        }
        self.asleep &= self._known.keys()

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

        The longest prompt and the largest cache count, because members may differ. An adapter counts if any member
        serves it.
        """
        pool, profiles = self._pool, [known.profile for known in self._known.values()]
        engine, discovery = pool.engine, pool.engine.discovery
        if discovery.max_model_len:
            longest = _largest((each.max_model_len for each in profiles), engine.max_model_len)
            engine = replace(engine, max_model_len=longest)
        if discovery.cache_tokens:
            most = _largest((each.cache_tokens for each in profiles), engine.cache_tokens)
            engine = replace(engine, cache_tokens=most)
        adapters = pool.model.adapters + self._adapters(profiles)
        return replace(pool, engine=engine, model=replace(pool.model, adapters=adapters))

    def _adapters(self, profiles: Iterable[EngineProfile]) -> tuple[str, ...]:
        """Return the adapters that engines serve and the specification does not name, in alphabetical order."""
        found = {adapter for each in profiles for adapter in each.adapters}
        return tuple(sorted(found.difference(self._pool.model.names)))


def _process(member: Member) -> tuple[str, str]:
    return member.endpoint, member.incarnation


def _largest(values: Iterable[int | None], default: int) -> int:
    return max((each for each in values if each), default=default)
