"""A recording as a trace that simulations replay, and what was measured of its requests."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dualmap.pools.pool import Pool
from dualmap.recordings.values import PoolChanged, PoolRemoved, RecordedOutcome, RecordedRequest
from dualmap_sim.recordings.errors import RecordingError
from dualmap_sim.recordings.exports import Export, ExportFormat
from dualmap_sim.recordings.pool_history import (
    PoolVersion,
    RecordedPool,
    TraceTime,
    Unrepeated,
    unrepeated_changes,
)
from dualmap_sim.recordings.reader import Reading
from dualmap_sim.workloads.trace import Trace, TraceRequest

IDLE_MOST_S: Final = 3600.0
"""A longer time without requests is shortened to this time, after which routers have forgotten what they forget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """The requests of one pool. ``trace`` has one request for each of ``requests``, in the same order.

    ``pool`` is the pool's last object in the recording, None if it has none, and ``versions`` has all of them.
    ``instances`` is the largest number of members at one time, or else the number of members that were chosen, 0 for an
    import. ``prefillers`` is the largest number of members of its prefill pool. ``unrepeated`` are changes that no
    simulation repeats, beside those between ``versions``. The answers of ``unknown_outputs`` requests have no known
    length, and the trace has the mean of the others for them. ``reading`` has been read completely.
    """

    trace: Trace
    requests: tuple[RecordedRequest, ...]
    pool: Pool | None
    instances: int
    prefillers: int
    versions: tuple[PoolVersion, ...]
    unrepeated: tuple[Unrepeated, ...]
    unknown_outputs: int
    reading: Reading

    @property
    def sample(self) -> float:
        """The smallest recorded share of the sessions."""
        return self.reading.samples[0]

    @property
    def members(self) -> tuple[str, ...]:
        """The ids of all members that the pool had, in the order in which they joined."""
        return tuple(dict.fromkeys(member.id for version in self.versions for member in version.pool.members))

    def unrepeated_between(self, first: RecordedRequest, last: RecordedRequest) -> tuple[Unrepeated, ...]:
        """Return the changes between the arrivals of two requests that no simulation repeats, in order of time."""
        found = [*self.unrepeated, *unrepeated_changes(self.versions)]
        between = [each for each in found if first.arrived_s < each.recorded_s <= last.arrived_s]
        return tuple(sorted(between, key=lambda each: each.recorded_s))


class Unusable(RecordingError):
    """A recording was read completely, but no pool of it can be used. ``reading`` says what is damaged."""

    def __init__(self, reason: str, reading: Reading) -> None:
        super().__init__(reason)
        self.reading = reading


class SeveralPools(Unusable):
    """A recording has several pools, of which one must be named."""

    def __init__(self, names: Sequence[str], reading: Reading) -> None:
        super().__init__(f"the recording has several pools; name one of {', '.join(names)}", reading)


def read_pools(reading: Reading) -> dict[str, RecordedPool]:
    """Return the pools of a recording by name, in one pass. All requests are then in memory."""
    pools: dict[str, RecordedPool] = {}
    for event in reading.events():
        if isinstance(event, RecordedRequest):
            pools.setdefault(event.pool, RecordedPool()).requests.append(event)
        elif isinstance(event, PoolChanged):
            several = len(reading.routers) > 1
            pools.setdefault(event.pool.id, RecordedPool()).change(event, several_routers=several)
        elif isinstance(event, PoolRemoved) and event.pool in pools:
            pools[event.pool].removed_s.append(event.at_s)
    return pools


def chosen_pool(pools: Mapping[str, RecordedPool], asked: str, reading: Reading) -> str:
    """Return the pool ``asked`` if it has requests, or without ``asked`` the only one that has.

    Raises Unusable, and SeveralPools for several pools without ``asked``.
    """
    names = [name for name, each in pools.items() if each.requests]
    if not names:
        raise Unusable("the recording has no requests, so there is nothing to simulate or to fit", reading)
    if not asked and len(names) > 1:
        raise SeveralPools(names, reading)
    if asked and asked not in names:
        raise Unusable(f"pool {asked} has no requests in the recording; name one of {', '.join(names)}", reading)
    return asked or names[0]


def read_traffic(path: Path, pool: str = "") -> Traffic:
    """Return the traffic of a recording's only pool, or of ``pool``. Raises RecordingError."""
    reading = Reading([path])
    pools = read_pools(reading)
    recorded = pools[chosen_pool(pools, pool, reading)]
    export = Export(lambda: recorded.requests, ExportFormat.MOONCAKE)
    outputs = [each.output_tokens for each in recorded.requests if each.output_tokens]
    usual_output = max(1, round(sum(outputs) / len(outputs))) if outputs else 1
    sessions: dict[int, int] = {}
    requests: list[RecordedRequest] = []
    traced, idle_s = [], 0.0
    for request, ids, input_tokens in export.prompts():
        session = request.session
        if requests:
            idle_s += max(0.0, request.arrived_s - requests[-1].arrived_s - IDLE_MOST_S)
        requests.append(request)
        traced.append(
            TraceRequest(
                arrival_s=request.arrived_s - idle_s,
                blocks=tuple(ids),
                input_tokens=input_tokens,
                output_tokens=request.output_tokens or usual_output,
                session=None if session is None else sessions.setdefault(session, len(sessions)),
            )
        )
    if not traced:
        raise Unusable("the recording has no requests with a prompt, so there is nothing to replay", reading)
    time = TraceTime([each.arrived_s for each in requests], [each.arrival_s for each in traced])
    prefilling = _prefilling(recorded.pool, pools)
    return Traffic(
        trace=Trace(name=path.name, block_tokens=export.block_tokens, requests=tuple(traced)),
        requests=tuple(requests),
        pool=recorded.pool,
        instances=recorded.members_most or len({each.receipt.chosen for each in requests if each.receipt is not None}),
        prefillers=prefilling.members_most,
        versions=tuple(map(time.version, recorded.versions)),
        unrepeated=(
            *(Unrepeated(what="the pool was removed", recorded_s=each) for each in recorded.removed_s),
            *(Unrepeated(what="the prefill pool changed", recorded_s=each.at_s) for each in prefilling.versions[1:]),
        ),
        unknown_outputs=sum(not each.output_tokens for each in requests),
        reading=reading,
    )


def _prefilling(pool: Pool | None, pools: Mapping[str, RecordedPool]) -> RecordedPool:
    """Return a pool's prefill pool; one without members if there is none, or if it was not recorded."""
    if pool is None or not pool.prefill_pool:
        return RecordedPool()
    return pools.get(f"{pool.namespace}/{pool.prefill_pool}", RecordedPool())


def was_measured(request: RecordedRequest) -> bool:
    """Return whether a router measured how a request was served or refused. An import has no measurements."""
    return request.receipt is not None or request.outcome is RecordedOutcome.REFUSED
