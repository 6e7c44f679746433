"""Follows the KV events of every member's engine over ZeroMQ's protocol (``dualmap_extproc.engines.zmtp``).

Each rank of a member is a source with one SUB socket, and for each replay a new DEALER socket. Sockets connect to the
member's own IP address only, whatever host an engine names. One task receives and applies the events of all sources, in
turns of a few milliseconds, so that a publisher that floods delays neither requests nor other sources for long. What a
source does not receive waits in the kernel and then at the publisher, which drops messages in the end. The source
finds the gap.
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import suppress
from functools import partial
from typing import Final, NamedTuple

from dualmap.engines.events import Batch, Unreadable
from dualmap.engines.profile import NO_PROFILE, EngineProfile
from dualmap.engines.residency import KvChange
from dualmap.engines.source import (
    MESSAGE_BYTES_MAX,
    Apply,
    Clear,
    Effect,
    EventSource,
    ReplayEnd,
    SourceState,
    SourceStatus,
    read_frames,
    replays_to_begin,
)
from dualmap.pools.pool import Member, Pool
from dualmap_edge.logs import get_logger
from dualmap_extproc.engines.event_messages import slices
from dualmap_extproc.engines.metrics import KvEventMetrics
from dualmap_extproc.engines.zmtp import ProtocolError, ZmtpConnection
from dualmap_extproc.engines.zmtp_socket import ZmtpSocket

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
CONNECT_S: Final = 3.0
"""A connection that is not open after this time is closed."""
RETRY_S: Final = (0.5, 10.0)
"""The shortest and the longest pause after a lost connection; each pause without a message between is twice as long."""
ERROR_RETRY_S: Final = 60.0
"""The pause of a source after an unexpected error."""
LOG_S: Final = 60.0
"""A source that fails again is logged again after it was live for this time since the last log line."""
_TICK_S: Final = 0.1
# Two reports of the same start differ by rounding only.
_SAME_START_S: Final = 1.0

# In the other states, a reason is about lost messages.
_NOT_CONNECTED: Final = frozenset((SourceState.CONNECTING, SourceState.FAILED))
# What a waiting message takes beside its payload.
_MESSAGE_BYTES: Final = 256

Report = Callable[[str, str, int, Sequence[KvChange], SourceStatus], None]
"""Receives changes: the pool (``namespace/name``), the member's id, the rank, the changes and the source's status."""

_log = get_logger(__name__)


class _Address(NamedTuple):
    """The publisher of one rank of a member. Another address, process or setting makes it another one."""

    pool: str
    member: str
    endpoint: str
    incarnation: str
    host: str
    rank: int
    port: int
    replay_port: int | None
    topic: str


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
        self._sources: dict[_Address, _Source] = {}
        # The ports that several members of a pool have, each with its pool and host.
        self._shared: Set[tuple[str, str, int]] = frozenset()
        self._ready: deque[_Source] = deque()
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
        wanted: dict[_Address, None] = {}
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
                source = _Source(address, self._loop, self._on_ready)
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
                address=_host_port(host, number),
            )
        self._shared = shared.keys()

    def _sources_of(self, key: tuple[str, str]) -> "list[_Source]":
        return [source for address, source in self._sources.items() if (address.pool, address.member) == key]

    def _on_ready(self, source: "_Source") -> None:
        self._queue(source)
        self._wake.set()

    def _queue(self, source: "_Source") -> None:
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
                source.fail(f"the replay failed: {_said(error)}", retry_s=now + RETRY_S[1])
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

    def _count(self, source: "_Source") -> None:
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

    def _abandon(self, source: "_Source", error: Exception) -> None:
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

    def _show(self, source: "_Source") -> None:
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
                    address=_host_port(address.host, address.port),
                    state=status.state.value,
                    reason=status.reason,
                )
            self._metrics.count(address.pool, changes, source.shown, status)
            source.shown = status
            self._report(address.pool, address.member, address.rank, changes, status)


class _Source:
    """One publisher: its sockets, and the effects that are not yet applied."""

    def __init__(
        self, address: _Address, loop: asyncio.AbstractEventLoop, on_ready: Callable[["_Source"], None]
    ) -> None:
        self.address = address
        self.queued = False
        self.counted_bytes = 0
        """The waiting bytes that the sum of all sources contains."""
        self.shown = SourceStatus()
        self.events = EventSource(replays=address.replay_port is not None, jitter=random.random())
        self.retry_s: float | None = None
        """The time of the next attempt to connect; None if the source is connected or connects."""
        # Without the address, because the dashboard shows reasons but no addresses.
        self._place = f"port {address.port}"
        self._no_message = f"{self._place}: no message yet"
        # What was logged, and when. A new hole of a partial source is nothing new.
        self._logged: set[str] = set()
        self._logged_s = 0.0
        self._loop = loop
        self._on_ready = partial(on_ready, self)
        self._live: ZmtpSocket | None = None
        self._replay: ZmtpSocket | None = None
        # The time at which the connection must be open; None if it is open.
        self._late_s: float | None = None
        self._pause_s = RETRY_S[0]
        self._attempt: int | None = None
        self._effects: deque[Effect] = deque()
        self._effect_bytes = 0
        self._unpacking: Iterator[Batch | Unreadable] | None = None
        self._unpacking_bytes = 0
        self._changes: list[KvChange] = [Clear()]
        # Whether a number or a refused connection showed a restart after the last profile, so that the start time of
        # the next profile is no further restart.
        self._restarted = False
        if address.replay_port is None:
            self.events.on_replay_problem("the engine reports no replay port")

    def is_news(self, status: SourceStatus, now: float) -> bool:
        """Return whether a status must be logged, which then counts as logged."""
        if self.shown.state is SourceState.LIVE and now >= self._logged_s + LOG_S:
            self._logged.clear()
        said = status.reason if status.state in _NOT_CONNECTED else SourceState.PARTIAL.value
        if not status.reason or said in self._logged or said == self._no_message:
            return False
        self._logged.add(said)
        self._logged_s = now
        return True

    def open(self, now: float) -> None:
        """Subscribe. The source begins when the publisher answers."""
        self.retry_s = None
        try:
            topic = self.address.topic.encode("utf-8", "surrogatepass")
            self._live = self._socket(b"SUB", (b"\x01" + topic,), self.address.port)
        except OSError as error:
            self.fail(f"the subscription failed: {_said(error)}", retry_s=now + RETRY_S[1])
            return
        self._late_s = now + CONNECT_S
        self.events.connect()

    def fail(self, reason: str, *, retry_s: float | None = None) -> None:
        """Stop for a reason; ``retry_s`` is the time of the next attempt, None if there is none."""
        self.close()
        self.retry_s = retry_s
        if self._effects or self._unpacking is not None:
            # The position of the source is behind these messages, and they are lost.
            self._drop_effects()
            self._changes += [each for each in self.events.on_lost() if isinstance(each, Clear)]
        self.events.on_failed(reason)

    def lose(self, now: float, error: Exception) -> None:
        """Close the connection after an error, and connect again later."""
        if self._late_s is None:
            closed = isinstance(error, ProtocolError)
            what = f"the connection was closed: {error}" if closed else "the connection was lost"
            self.fail(f"{self._place}: {what}")
        else:
            # The source still connects. An engine that starts answers only after minutes. Its cache is empty.
            self.close()
            self.events.on_waiting(f"{self._place}: {_said(error)}")
            if isinstance(error, ConnectionRefusedError) and (effects := self.events.on_refused()):
                self._restarted = True
                self._act(effects)
        self.retry_s = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, RETRY_S[1])

    def give_up(self, now: float) -> None:
        """Close a connection that takes too long, and connect again later."""
        awaited = "ZMTP greeting" if self._live is not None and self._live.is_connected else "connection"
        self.lose(now, TimeoutError(f"no {awaited} within {CONNECT_S:g} s"))

    def close(self) -> None:
        """Close the sockets."""
        self._late_s = None
        self._close_replay()
        if self._live is not None:
            self._live.close()
            self._live = None

    def is_late(self, now: float) -> bool:
        """Return whether the publisher takes too long to answer the connection."""
        return self._late_s is not None and self._late_s <= now

    @property
    def waiting_bytes(self) -> int:
        """About how many bytes the messages take that are not applied."""
        sockets = sum(each.waiting_bytes for each in (self._live, self._replay) if each is not None)
        messages = len(self._effects) + self.events.queued_messages
        waiting = sockets + self._effect_bytes + self._unpacking_bytes + self.events.queued_bytes
        return waiting + _MESSAGE_BYTES * messages

    def on_other_start(self, now: float) -> None:
        """The engine's process has another start time."""
        # A process that says its start time is ready, so the next attempts come soon.
        self._pause_s = RETRY_S[0]
        if self.retry_s is not None:
            self.retry_s = min(self.retry_s, now)
        if self._restarted:
            self._restarted = False
        else:
            self._act(self.events.on_restart(now))

    def on_asleep(self, *, asleep: bool) -> None:
        """The engine has fallen asleep, or it is awake again."""
        if asleep:
            self._act(self.events.on_sleep())
        else:
            self.events.on_wake()

    @property
    def is_replaying(self) -> bool:
        """Whether a replay runs or is wanted."""
        return self.events.attempt is not None or self.events.replay_wanted_s is not None

    def on_deadline(self, now: float) -> None:
        """End a silent replay."""
        self._act(self.events.on_deadline(now))

    def begin_replay(self, now: float) -> None:
        """Request a replay on a new socket."""
        self._close_replay()
        replay = self.events.begin_replay(now)
        assert self.address.replay_port is not None
        self._attempt = replay.attempt
        self._on_replay_problem("no answer")
        request = (b"", replay.start.to_bytes(8, "big"))
        self._replay = self._socket(b"DEALER", request, self.address.replay_port)

    def step(self, now: float) -> bool:
        """Apply a slice of events, or receive a message; return whether there may be more."""
        if self._attempt is not None and self.events.attempt != self._attempt:
            self._close_replay()
        if self._apply_slice() or self._receive_replay(now) or self._receive_live(now):
            return True
        for socket in (self._replay, self._live):
            if socket is not None:
                socket.watch()
        return False

    def take_changes(self) -> tuple[KvChange, ...]:
        """Return the changes since the last call."""
        changes = tuple(self._changes)
        self._changes.clear()
        return changes

    def _apply_slice(self) -> bool:
        """Apply the next slice of the next effect; return whether there was one."""
        if self._unpacking is not None:
            read = next(self._unpacking, None)
            if read is None or isinstance(read, Unreadable):
                self._unpacking, self._unpacking_bytes = None, 0
            if isinstance(read, Unreadable):
                self._changes += [each for each in self.events.on_unreadable(read.reason) if isinstance(each, Clear)]
            elif read is not None:
                self._changes.append(read)
            return True
        if not self._effects:
            return False
        effect = self._effects.popleft()
        if isinstance(effect, Apply):
            size = len(effect.message.payload)
            self._effect_bytes -= size
            self._unpacking, self._unpacking_bytes = slices(effect.message.payload), size
        else:
            self._changes.append(effect)
        return True

    def _receive_replay(self, now: float) -> bool:
        """Receive an answer to the replay; return whether there may be more."""
        if self._replay is None:
            return False
        try:
            frames = self._replay.receive()
        except (OSError, ProtocolError) as error:
            # The attempt ends as a silent one.
            self._on_replay_problem(_said(error))
            self._close_replay()
            return True
        message = read_frames(frames) if frames else None
        if message is not None and self._attempt is not None:
            self._pause_s = RETRY_S[0]
            self._act(self.events.on_replayed(now, self._attempt, message))
        return frames is not None

    def _receive_live(self, now: float) -> bool:
        """Receive a live message; return whether there may be more."""
        if self._live is None:
            return False
        try:
            frames = self._live.receive()
        except (OSError, ProtocolError) as error:
            self.lose(now, error)
            return True
        if self._late_s is not None and self._live.is_open:
            self._late_s = None
            self.events.start(now)
            self.events.on_waiting(self._no_message)
        message = read_frames(frames) if frames else None
        if message is not None and not isinstance(message, ReplayEnd):
            self._pause_s = RETRY_S[0]
            effects = self.events.on_live(now, message)
            self._restarted |= any(isinstance(each, Clear) for each in effects)
            self._act(effects)
        elif frames:
            self.events.on_waiting(f"{self._place}: the messages are not those of KV events")
        return frames is not None

    def _on_replay_problem(self, what: str) -> None:
        self.events.on_replay_problem(f"replay port {self.address.replay_port}: {what}")

    def _act(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Clear):
                # What has not been applied is about blocks that are gone.
                self._drop_effects()
            elif isinstance(effect, Apply):
                self._effect_bytes += len(effect.message.payload)
            self._effects.append(effect)

    def _drop_effects(self) -> None:
        self._effects.clear()
        self._effect_bytes = 0
        self._unpacking, self._unpacking_bytes = None, 0

    def _socket(self, kind: bytes, first: Sequence[bytes], port: int) -> ZmtpSocket:
        connection = ZmtpConnection(kind, first, message_bytes=MESSAGE_BYTES_MAX)
        opened = ZmtpSocket(self.address.host, port, connection, self._loop, self._on_ready)
        opened.watch()
        return opened

    def _close_replay(self) -> None:
        self._attempt = None
        if self._replay is not None:
            self._replay.close()
            self._replay = None


def _addresses(pool: Pool, member: Member, profile: EngineProfile) -> list[_Address]:
    """Return the publishers of a member: those that its engine says, else those of the pool's specification."""
    events = pool.engine.kv_events
    address = partial(
        _Address,
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


def _host_port(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _said(error: Exception) -> str:
    """Return what happened to a connection, such as "connection refused"."""
    return error.strerror.lower() if isinstance(error, OSError) and error.strerror else str(error)


def _process(member: Member) -> tuple[str, str]:
    return member.endpoint, member.incarnation
