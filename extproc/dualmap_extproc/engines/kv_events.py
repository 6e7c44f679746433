"""Follows the KV events of every member's engine over ZeroMQ's protocol (``dualmap_extproc.engines.zmtp``).

Each rank of a member is a source with a connection of its own (``source_connection``). Connections go to the member's
own IP address only, whatever host an engine names. One task receives and applies the events of all sources, in
turns of a few milliseconds, so that a publisher that floods delays neither requests nor other sources for long. What a
source does not receive waits in the kernel and then at the publisher, which drops messages in the end. The source
finds the gap.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from functools import partial
from typing import Final

from dualmap.engines.profile import NO_PROFILE, EngineProfile
from dualmap.engines.residency import KvChange
from dualmap.engines.source import (
    Clear,
    SourceStatus,
    replays_to_begin,
)
from dualmap.pools.pool import Member, Pool
from dualmap_edge import ports
from dualmap_edge.logs import get_logger
from dualmap_extproc.engines.metrics import KvEventMetrics
from dualmap_extproc.engines.source_connection import RETRY_S, Publisher, SourceConnection, failure_of

TURN_S: Final = 0.005
"""The work on events without a pause. If the loop has other work, the pause after it is as long, so that events take
half of the time at most."""
OTHERS_S: Final = 0.0003
"""The loop has other work if one round of it takes longer than this time."""
RANKS_MAX: Final = 64
"""The most ranks of one member that the router follows."""
SOURCES_MAX: Final = 1024
"""The most sources that the router follows."""
WAITING_BYTES_MAX: Final = 67108864
"""The most bytes of messages of all sources that are received and not applied. Above, the source with the most bytes
begins again: its connection is closed, and its blocks are forgotten if messages are lost."""
ERROR_RETRY_S: Final = 60.0
"""The pause of a source after an unexpected error."""
_TICK_S: Final = 0.1
# Two reports of the same start differ by rounding only.
_SAME_START_S: Final = 1.0

Report = Callable[[str, str, int, Sequence[KvChange], SourceStatus], None]
"""Receives changes: the pool (``namespace/name``), the member's id, the rank, the changes and the source's status."""

_log = get_logger(__name__)


class KvEvents:
    """Follows the engines of all pools with KV events; construct it in an event loop.

    ``run`` must run while sources are followed. ``report`` receives every change in order, and every change of state.
    """

    def __init__(self, report: Report, metrics: KvEventMetrics) -> None:
        self._report = report
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._members: dict[tuple[str, str], tuple[Pool, Member]] = {}
        # The last profile of each member, and the last profile with event sources of its process.
        self._profiles: dict[tuple[str, str], EngineProfile] = {}
        self._sources: dict[Publisher, SourceConnection] = {}
        # The ports that several members of a pool have, each with its pool and host.
        self._shared: Set[tuple[str, str, int]] = frozenset()
        self._ready: deque[SourceConnection] = deque()
        self._tick_s = 0.0
        self._waiting_bytes = 0

    def set_pools(self, pools: Sequence[Pool]) -> None:
        """Follow the members of these pools from now on, and no others."""
        members = {
            (pool.id, member.id): (pool, member)
            for pool in pools
            if pool.engine.kv_events.enabled
            for member in pool.members
        }
        for key, (_, member) in self._members.items():
            if key not in members or _process(members[key][1]) != _process(member):
                self._profiles.pop(key, None)
        self._members = members
        self._metrics.set_pools(pool for pool, _ in members)
        self._follow()

    def on_profile(self, pool: str, member: str, profile: EngineProfile) -> None:
        """Take the ports, the ranks and the start time that a member's engine says."""
        key = (pool, member)
        if key not in self._members:
            return
        before = self._profiles.get(key)
        if before is not None:
            started_s, last_s = profile.started_s, before.started_s
            if started_s is None:
                profile = profile.also(EngineProfile(started_s=last_s))
            elif last_s is not None and abs(started_s - last_s) > _SAME_START_S:
                for source in self._sources_of(key):
                    source.on_other_start(self._loop.time())
                    self._queue(source)
            if not profile.event_sources and profile.publishes is None:
                # The page with the sources is not answered at times, and the sources stay the same.
                profile = profile.also(EngineProfile(event_sources=before.event_sources, publishes=before.publishes))
            if not profile.ranks:
                profile = profile.also(EngineProfile(ranks=before.ranks))
            if bool(profile.asleep) != bool(before.asleep):
                for source in self._sources_of(key):
                    source.on_asleep(asleep=bool(profile.asleep))
                    self._queue(source)
        self._profiles[key] = profile
        if before is None or _publishers(before) != _publishers(profile):
            if profile.events_problem:
                _log.warning("KV events are off", pool=pool, member=member, reason=profile.events_problem)
            self._follow()

    async def run(self) -> None:
        """Receive and apply events until cancelled."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_TICK_S if self._sources else None):
                    await self._wake.wait()
            self._wake.clear()
            self._tick()
            while self._ready:
                began_s = self._loop.time()
                self._turn(began_s + TURN_S)
                await self._let_others_work(self._loop.time() - began_s)
                self._tick()

    async def _let_others_work(self, used_s: float) -> None:
        """Let the loop do other work for as long as events used it, if there is other work."""
        began_s = self._loop.time()
        # The loop collects the events that have arrived in the first sleep, and handles them before the second sleep
        # ends.
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        others_s = self._loop.time() - began_s
        if others_s > OTHERS_S:
            await asyncio.sleep(max(0.0, used_s - others_s))

    def close(self) -> None:
        """Close all sockets."""
        for source in self._sources.values():
            source.close()
        self._sources.clear()

    def _follow(self) -> None:
        """Open the sources that are wanted, and close all others."""
        wanted: dict[Publisher, None] = {}
        for key, (pool, member) in self._members.items():
            profile = self._profiles.get(key)
            if profile is None and pool.engine.discovery.enabled:
                # The first profile says the ports. It comes soon, also from an engine that does not answer.
                continue
            wanted |= dict.fromkeys(_addresses(pool, member, profile or NO_PROFILE))
        for address in self._sources.keys() - wanted.keys():
            source = self._sources.pop(address)
            source.close()
            self._waiting_bytes -= source.counted_bytes
            self._report(address.pool, address.member, address.rank, (Clear(),), SourceStatus())
        for address in wanted:
            if address not in self._sources:
                full = len(self._sources) >= SOURCES_MAX
                source = SourceConnection(address, self._loop, self._on_ready)
                self._sources[address] = source
                if self._profiles.get((address.pool, address.member), NO_PROFILE).asleep:
                    source.on_asleep(asleep=True)
                if full:
                    source.fail(f"the router follows {SOURCES_MAX} sources already")
                else:
                    source.open(self._loop.time())
                self._queue(source)
        self._warn_of_shared_ports()
        self._wake.set()

    def _warn_of_shared_ports(self) -> None:
        """Log each port that several members of a pool have: all of them get the events of one engine."""
        members: dict[tuple[str, str, int], set[str]] = {}
        for each in self._sources:
            members.setdefault((each.pool, each.host, each.port), set()).add(each.member)
        shared = {port: names for port, names in members.items() if len(names) > 1}
        for port in shared.keys() - self._shared:
            pool, host, number = port
            _log.warning(
                "Members have the same port of KV events",
                pool=pool,
                members=sorted(shared[port]),
                address=ports.address(host, number),
            )
        self._shared = shared.keys()

    def _sources_of(self, key: tuple[str, str]) -> list[SourceConnection]:
        return [source for address, source in self._sources.items() if (address.pool, address.member) == key]

    def _on_ready(self, source: SourceConnection) -> None:
        self._queue(source)
        self._wake.set()

    def _queue(self, source: SourceConnection) -> None:
        if not source.queued:
            source.queued = True
            self._ready.append(source)
            self._wake.set()

    def _tick(self) -> None:
        """Begin and end connections and replays."""
        now = self._loop.time()
        if now < self._tick_s:
            return
        self._tick_s = now + _TICK_S
        for source in self._sources.values():
            if source.retry_s is not None and source.retry_s <= now:
                source.open(now)
                self._queue(source)
            elif source.is_late(now):
                source.give_up(now)
                self._queue(source)
        replaying = {id(each.events): each for each in self._sources.values() if each.is_replaying}
        for source in replaying.values():
            source.on_deadline(now)
            self._queue(source)
        for events in replays_to_begin(now, [source.events for source in replaying.values()]):
            source = replaying[id(events)]
            try:
                source.begin_replay(now)
            except OSError as error:
                source.fail(f"the replay failed: {failure_of(error)}", retry_s=now + RETRY_S[1])
            self._queue(source)

    def _turn(self, until_s: float) -> None:
        """Let each waiting source do a bounded step, until the time is over or no source waits."""
        while self._ready and self._loop.time() < until_s:
            source = self._ready.popleft()
            source.queued = False
            if self._sources.get(source.address) is not source:
                continue
            try:
                more = source.step(self._loop.time())
                self._show(source)
            except Exception as error:  # noqa: BLE001  # One source's fault must not stop routing or other sources.
                more = False
                self._abandon(source, error)
            if more:
                self._queue(source)
            self._count(source)
            if self._waiting_bytes > WAITING_BYTES_MAX:
                self._relieve()

    def _count(self, source: SourceConnection) -> None:
        """Add the change of a source's waiting bytes to the sum."""
        waiting = source.waiting_bytes
        self._waiting_bytes += waiting - source.counted_bytes
        source.counted_bytes = waiting

    def _relieve(self) -> None:
        """Close the connection of the source with the most waiting bytes, which begins again later."""
        source = max(self._sources.values(), key=lambda each: each.counted_bytes)
        source.fail("too many of its messages waited", retry_s=self._loop.time() + RETRY_S[1])
        self._count(source)
        self._queue(source)

    def _abandon(self, source: SourceConnection, error: Exception) -> None:
        """Stop a source because of an unexpected error, and forget the rank's blocks."""
        address = source.address
        _log.error(
            "Abandoning KV event source",
            pool=address.pool,
            member=address.member,
            rank=address.rank,
            error=repr(error),
        )
        source.fail(f"an unexpected error: {type(error).__name__}", retry_s=self._loop.time() + ERROR_RETRY_S)
        source.take_changes()
        source.shown = source.events.status
        with suppress(Exception):
            self._report(address.pool, address.member, address.rank, (Clear(),), source.shown)

    def _show(self, source: SourceConnection) -> None:
        changes = source.take_changes()
        status = source.events.status
        if changes or status != source.shown:
            address = source.address
            if source.is_news(status, self._loop.time()):
                _log.warning(
                    "KV events are incomplete",
                    pool=address.pool,
                    member=address.member,
                    rank=address.rank,
                    address=ports.address(address.host, address.port),
                    state=status.state.value,
                    reason=status.reason,
                )
            self._metrics.count(address.pool, changes, source.shown, status)
            source.shown = status
            self._report(address.pool, address.member, address.rank, changes, status)


def _addresses(pool: Pool, member: Member, profile: EngineProfile) -> list[Publisher]:
    """Return the publishers of a member: those that its engine says, else those of the pool's specification."""
    events = pool.engine.kv_events
    address = partial(
        Publisher,
        pool=pool.id,
        member=member.id,
        endpoint=member.endpoint,
        incarnation=member.incarnation,
        host=member.address,
    )
    if profile.events_problem:
        return []
    if not profile.event_sources:
        return [
            address(rank=rank, port=events.port + rank, replay_port=events.replay_port + rank, topic=events.topic)
            for rank in (profile.ranks or (0,))[:RANKS_MAX]
        ]
    return [
        address(
            rank=source.rank,
            port=source.port or events.port + source.rank,
            replay_port=source.replay_port,
            topic=source.topic,
        )
        for source in profile.event_sources[:RANKS_MAX]
    ]


def _publishers(profile: EngineProfile) -> tuple[object, ...]:
    """Return the facts on which a member's publishers depend."""
    return profile.event_sources, profile.ranks, profile.publishes


def _process(member: Member) -> tuple[str, str]:
    return member.endpoint, member.incarnation
