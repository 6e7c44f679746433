"""Experiments with the members of a recorded pool, which join, change and leave at their recorded times."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from dualmap.pools.pool import Pool
from dualmap_sim.events import Event, Forget, PoolChange
from dualmap_sim.experiment import Experiment, load_trace, pool_of
from dualmap_sim.recordings.pool_history import PoolVersion, versions_between
from dualmap_sim.recordings.replays import Traffic

Settings = Callable[[Experiment, Pool], Experiment]
"""Returns an experiment with the settings of a version of the pool."""


def as_it_is(experiment: Experiment, _version: Pool) -> Experiment:
    """Return the experiment, so that only the members change."""
    return experiment


def with_changes(experiment: Experiment, traffic: Traffic, settings: Settings = as_it_is) -> Experiment:
    """Return an experiment with the recorded members at the beginning of its workload, and all later changes.

    The times of changes are scaled with the experiment's rate, as the times of its requests are. ``traffic`` has the
    workload's requests, and at least one version of the pool.
    """
    trace = load_trace(experiment)
    start_s, lasts_s = trace.requests[0].arrival_s, trace.duration_s
    factor = trace.at_rate(experiment.requests_per_s).duration_s / lasts_s if lasts_s else 1.0

    def configured(version: PoolVersion) -> Experiment:
        members = tuple(
            member if member.leave_at_s is None else replace(member, leave_at_s=factor * (member.leave_at_s - start_s))
            for member in version.pool.members
        )
        return replace(settings(experiment, version.pool), members=members)

    first, *later = versions_between(traffic.versions, start_s, start_s + lasts_s)
    begun, before = configured(first), first.pool
    events: list[Event] = []
    pool = pool_of(begun)
    for version in later:
        at_s = factor * (version.at_s - start_s)
        changed = pool_of(configured(version))
        if changed != pool:
            events += [PoolChange(at_s=at_s, pool=changed), *_restarts(before, version.pool, at_s)]
        pool, before = changed, version.pool
    return replace(begun, events=tuple(events))


def _restarts(before: Pool, after: Pool, at_s: float) -> Iterator[Forget]:
    """Yield the loss of the cache of each engine that restarted at its address. Others have a new engine anyway."""
    engines = {member.id: member for member in before.members}
    for member in after.members:
        known = engines.get(member.id)
        if known is None or known.endpoint != member.endpoint:
            continue
        if known.incarnation and member.incarnation and known.incarnation != member.incarnation:
            yield Forget(at_s=at_s, member=member.id)
