"""A pool during a recording: its requests and its versions, and what of their changes a simulation cannot repeat."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from dualmap.pools.pool import Pool
from dualmap.recordings.values import PoolChanged, RecordedRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolVersion:
    """A pool from ``at_s`` on, in the time of a trace. ``recorded_s`` is this time since the epoch.

    The times at which its members leave are in the time of the trace, too.
    """

    at_s: float
    recorded_s: float
    pool: Pool


@dataclass(frozen=True, slots=True, kw_only=True)
class Unrepeated:
    """A change of the pool at ``recorded_s`` (since the epoch) that a simulation does not repeat, as a sentence."""

    what: str
    recorded_s: float


@dataclass(slots=True)
class RecordedPool:
    """A pool of a recording: its requests in order of arrival, and what its lines say.

    ``versions`` has a line for each change of the pool, and ``removed_s`` the times at which the pool was removed.
    """

    requests: list[RecordedRequest] = field(default_factory=list)
    versions: list[PoolChanged] = field(default_factory=list)
    removed_s: list[float] = field(default_factory=list)

    @property
    def pool(self) -> Pool | None:
        """The pool's last version; None without a line about it."""
        return self.versions[-1].pool if self.versions else None

    @property
    def members_most(self) -> int:
        """The largest number of members at one time."""
        return max((len(version.pool.members) for version in self.versions), default=0)

    def change(self, changed: PoolChanged, *, several_routers: bool) -> None:
        """Add a version, if it is new. ``several_routers`` may each say it, one of them later than the others.

        A router that begins a file says the pool as it knows it. If another router was faster, this is an old version.
        """
        before = self.pool
        if before is None or self.removed_s[-1:] >= [self.versions[-1].at_s]:
            self.versions.append(changed)
            return
        is_old = several_routers and changed.pool.ring_version < before.ring_version
        if changed.pool != before and not is_old:
            self.versions.append(changed)


class TraceTime:
    """Converts recorded times to times of a trace, in which long times without requests are shorter."""

    def __init__(self, recorded_s: Sequence[float], traced_s: Sequence[float]) -> None:
        self._recorded_s = recorded_s
        self._traced_s = traced_s

    def of(self, recorded_s: float) -> float:
        """Return the time of a trace at a time since the epoch, never after the next arrival."""
        last = max(0, bisect_right(self._recorded_s, recorded_s) - 1)
        traced_s = self._traced_s[last] + recorded_s - self._recorded_s[last]
        following = self._traced_s[last + 1 : last + 2]
        return min(traced_s, *following) if following else traced_s

    def version(self, changed: PoolChanged) -> PoolVersion:
        """Return a version of a pool in the time of the trace."""
        members = tuple(
            member if member.leave_at_s is None else replace(member, leave_at_s=self.of(member.leave_at_s))
            for member in changed.pool.members
        )
        return PoolVersion(
            at_s=self.of(changed.at_s), recorded_s=changed.at_s, pool=replace(changed.pool, members=members)
        )


def versions_between(versions: Sequence[PoolVersion], first_s: float, last_s: float) -> Sequence[PoolVersion]:
    """Return the version at ``first_s``, or else the first one, and all later ones up to ``last_s``."""
    place = max(1, bisect_right(versions, first_s, key=lambda version: version.at_s))
    return [versions[place - 1], *(version for version in versions[place:] if version.at_s <= last_s)]


def unrepeated_changes(versions: Sequence[PoolVersion]) -> Iterator[Unrepeated]:
    """Yield the changes between versions that a simulation does not repeat, in order of time."""
    for before, after in pairwise(versions):
        for what in _unrepeated(before.pool, after.pool):
            yield Unrepeated(what=what, recorded_s=after.recorded_s)


def _unrepeated(before: Pool, after: Pool) -> Iterator[str]:
    if before.prefill_pool != after.prefill_pool:
        yield "spec.prefillPool changed"
    elif after.prefill_pool and before != after:
        yield "the pool changed, which has a prefill pool"
    elif before.kv_store != after.kv_store:
        yield "spec.kvStore changed"
    if before.routing.prefix.block_tokens != after.routing.prefix.block_tokens:
        yield "spec.routing.prefix.blockTokens changed"
