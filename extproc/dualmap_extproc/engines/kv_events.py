"""Follows the KV events of every member's engine: the only module with ZeroMQ sockets.

Each rank of a member is a source with one SUB socket, and for each replay a new DEALER socket. Sockets connect to the
member's own IP address only, whatever host an engine names. One task receives and applies the events of all sources, in
turns of a few milliseconds, so that a publisher that floods delays neither requests nor other sources for long. What a
source does not receive waits in the sockets and then at the publisher, which drops messages in the end. The source
finds the gap.
"""

import asyncio
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, NamedTuple

import zmq

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
    SourceStatus,
    read_frames,
    replays_to_begin,
)
from dualmap.pools.pool import Member, Pool
from dualmap_edge.logs import get_logger
from dualmap_extproc.engines.event_messages import slices
from dualmap_extproc.engines.metrics import KvEventMetrics

TURN_S: Final = 0.005
"""The work on events without a pause. The pause after it is as long, so that events take half of the time at most."""
RANKS_MAX: Final = 64
"""The most ranks of one member that the router follows."""
SOURCES_MAX: Final = 1024
"""The most sources that the router follows."""
LIVE_MESSAGES_MAX: Final = 16
"""The most live messages that wait in a socket. More of them wait at the publisher, which has a larger queue."""
REPLAY_MESSAGES_MAX: Final = 256
"""The most messages of a replay that wait in a socket. Publishers drop what neither this nor their own queue takes."""
FRAMES_MAX: Final = 8
"""The most frames of a message; a message with more is ignored."""
RETRY_S: Final = (0.5, 60.0)
"""The shortest and the longest pause after a lost connection; each pause without a message between is twice as long."""
_RECONNECT_MS: Final = (500, 10_000)
_HEARTBEAT_MS: Final = (10_000, 30_000)
_CONNECT_TIMEOUT_MS: Final = 3_000
_TICK_S: Final = 0.1
# Two reports of the same start differ by rounding only.
_SAME_START_S: Final = 1.0

# ZeroMQ connects again after most errors, but not after data that is not of its protocol, or a message above the bound.
_CONNECTED: Final = zmq.EVENT_HANDSHAKE_SUCCEEDED
_LOST: Final = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)

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
        self._context = zmq.Context()
        # Each source has a socket, and a socket that reports its connections at both ends.
        self._context.set(zmq.MAX_SOCKETS, 3 * SOURCES_MAX + 64)
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._members: dict[tuple[str, str], tuple[Pool, Member]] = {}
        # The last profile of each member, and the last profile with event sources of its process.
        self._profiles: dict[tuple[str, str], EngineProfile] = {}
        self._sources: dict[_Address, _Source] = {}
        self._ready: deque[_Source] = deque()
        self._tick_s = 0.0

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
        """Take the ports and the start time that a member's engine says."""
        key = (pool, member)
        if key not in self._members:
            return
        before = self._profiles.get(key)
        if before is not None:
            started_s, last_s = profile.started_s, before.started_s
            if started_s is None:
                profile = profile.also(EngineProfile(started_s=last_s))
            elif last_s is not None and abs(started_s - last_s) > _SAME_START_S:
                for address, source in self._sources.items():
                    if (address.pool, address.member) == key:
                        source.on_other_start(self._loop.time())
                        self._queue(source)
            if not profile.event_sources:
                # The page with the sources is not answered at times, and the sources stay the same.
                profile = profile.also(EngineProfile(event_sources=before.event_sources))
        self._profiles[key] = profile
        if before is None or before.event_sources != profile.event_sources:
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
                await asyncio.sleep(self._loop.time() - began_s)
                self._tick()

    def close(self) -> None:
        """Close all sockets."""
        for source in self._sources.values():
            source.close()
        self._sources.clear()
        self._context.destroy(linger=0)

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
            self._sources.pop(address).close()
            self._report(address.pool, address.member, address.rank, (Clear(),), SourceStatus())
        for address in wanted:
            if address not in self._sources:
                full = len(self._sources) >= SOURCES_MAX
                source = _Source(self._context, address, self._loop, self._on_ready)
                self._sources[address] = source
                if full:
                    source.fail(f"the router follows {SOURCES_MAX} sources already")
                else:
                    source.open(self._loop.time())
                self._queue(source)
        self._wake.set()

    def _on_ready(self, source: "_Source") -> None:
        self._queue(source)
        self._wake.set()

    def _queue(self, source: "_Source") -> None:
        if not source.queued:
            source.queued = True
            self._ready.append(source)
            self._wake.set()

    def _tick(self) -> None:
        """Begin and end replays."""
        now = self._loop.time()
        if now < self._tick_s:
            return
        self._tick_s = now + _TICK_S
        for source in self._sources.values():
            if source.retry_s is not None and source.retry_s <= now:
                source.open(now)
                self._queue(source)
        replaying = {id(each.events): each for each in self._sources.values() if each.is_replaying}
        for source in replaying.values():
            source.on_deadline(now)
            self._queue(source)
        for events in replays_to_begin(now, [source.events for source in replaying.values()]):
            source = replaying[id(events)]
            try:
                source.begin_replay(now)
            except (zmq.ZMQError, OSError) as error:
                source.fail(f"the replay failed: {error}", retry_s=now + RETRY_S[1])
            self._queue(source)

    def _turn(self, until_s: float) -> None:
        """Let each waiting source do a bounded step, until the time is over or no source waits."""
        while self._ready and self._loop.time() < until_s:
            source = self._ready.popleft()
            source.queued = False
            try:
                more = source.step(self._loop.time())
                self._show(source)
            except Exception as error:  # noqa: BLE001  # One source's fault must not stop routing or other sources.
                more = False
                self._abandon(source, error)
            if more:
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
        source.fail(f"an unexpected error: {type(error).__name__}")
        source.take_changes()
        source.shown = source.events.status
        with suppress(Exception):
            self._report(address.pool, address.member, address.rank, (Clear(),), source.shown)

    def _show(self, source: "_Source") -> None:
        changes = source.take_changes()
        status = source.events.status
        if changes or status != source.shown:
            address = source.address
            if status.reason and (status.state, status.reason) != (source.shown.state, source.shown.reason):
                _log.warning(
                    "KV events are incomplete",
                    pool=address.pool,
                    member=address.member,
                    rank=address.rank,
                    state=status.state.value,
                    reason=status.reason,
                )
            self._metrics.count(address.pool, changes, source.shown, status)
            source.shown = status
            self._report(address.pool, address.member, address.rank, changes, status)


class _Source:
    """One publisher: its sockets, and the effects that are not yet applied."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        address: _Address,
        loop: asyncio.AbstractEventLoop,
        on_ready: Callable[["_Source"], None],
    ) -> None:
        self.address = address
        self.queued = False
        self.shown = SourceStatus()
        self.events = EventSource(replays=address.replay_port is not None, jitter=random.random())
        self.retry_s: float | None = None
        """The time of the next attempt to connect; None if the source is connected or connects."""
        self._context = context
        self._loop = loop
        self._on_ready = on_ready
        self._live: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._replay: zmq.Socket[bytes] | None = None
        self._lost = False
        self._pause_s = RETRY_S[0]
        self._attempt: int | None = None
        self._effects: deque[Effect] = deque()
        self._unpacking: Iterator[Batch | Unreadable] | None = None
        self._changes: list[KvChange] = [Clear()]
        # Whether the numbers showed a restart after the last profile, so that its start time is no further restart.
        self._restarted = False

    def open(self, now: float) -> None:
        """Subscribe. The source begins when the publisher answers."""
        self.retry_s = None
        self._lost = False
        try:
            self._live = self._socket(zmq.SUB, LIVE_MESSAGES_MAX)
            self._monitor = self._live.get_monitor_socket(_CONNECTED | _LOST)
            self._live.subscribe(self.address.topic.encode("utf-8", "surrogatepass"))
            self._live.connect(_endpoint(self.address.host, self.address.port))
            self._watch(self._live)
            self._watch(self._monitor)
        except (zmq.ZMQError, OSError) as error:
            self.fail(f"the subscription failed: {error}", retry_s=now + RETRY_S[1])
            return
        self.events.connect()

    def fail(self, reason: str, *, retry_s: float | None = None) -> None:
        """Stop for a reason; ``retry_s`` is the time of the next attempt, None if there is none."""
        self.close()
        self.retry_s = retry_s
        self._effects.clear()
        self._unpacking = None
        self.events.on_failed(reason)

    def close(self) -> None:
        """Close the sockets."""
        self._close_replay()
        monitor, self._monitor = self._monitor, None
        if self._live is not None:
            self._unwatch(self._live)
            self._live.disable_monitor()
            self._live.close(linger=0)
            self._live = None
        if monitor is not None:
            self._unwatch(monitor)
            monitor.close(linger=0)

    def on_other_start(self, now: float) -> None:
        """The engine's process has another start time."""
        if self._restarted:
            self._restarted = False
        else:
            self._act(self.events.on_restart(now))

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
        self._replay = self._socket(zmq.DEALER, REPLAY_MESSAGES_MAX)
        self._replay.connect(_endpoint(self.address.host, self.address.replay_port))
        self._replay.send_multipart([b"", replay.start.to_bytes(8, "big")], flags=zmq.NOBLOCK)
        self._watch(self._replay)

    def step(self, now: float) -> bool:
        """Apply a slice of events, or receive a message; return whether there may be more."""
        if self._attempt is not None and self.events.attempt != self._attempt:
            self._close_replay()
        if self._apply_slice():
            return True
        # The monitor comes first, because messages count only after the connection.
        if self._monitor is not None and self._hear(now, self._monitor):
            return True
        for socket in (self._replay, self._live):
            if socket is not None and self._receive(now, socket):
                return True
        if self._lost:
            self.fail("the connection was lost", retry_s=now + self._pause_s)
            self._pause_s = min(2 * self._pause_s, RETRY_S[1])
        for socket in (self._monitor, self._replay, self._live):
            if socket is not None:
                self._watch(socket)
        return False

    def _hear(self, now: float, monitor: "zmq.Socket[bytes]") -> bool:
        """Read a report of the connection; return whether there was one."""
        try:
            frames = monitor.recv_multipart(flags=zmq.NOBLOCK)
        except zmq.Again:
            return False
        event = int.from_bytes(frames[0][:2], sys.byteorder)
        if event & _LOST:
            self._lost = True
        elif event & _CONNECTED:
            self.events.start(now)
        return True

    def take_changes(self) -> tuple[KvChange, ...]:
        """Return the changes since the last call."""
        changes = tuple(self._changes)
        self._changes.clear()
        return changes

    def _apply_slice(self) -> bool:
        """Apply the next slice of the next effect; return whether there was one."""
        if self._unpacking is not None:
            read = next(self._unpacking, None)
            if read is None:
                self._unpacking = None
            elif isinstance(read, Unreadable):
                self._unpacking = None
                self._changes += [each for each in self.events.on_unreadable(read.reason) if isinstance(each, Clear)]
            else:
                self._changes.append(read)
            return True
        if not self._effects:
            return False
        effect = self._effects.popleft()
        if isinstance(effect, Apply):
            self._unpacking = slices(effect.message.payload)
        else:
            self._changes.append(effect)
        return True

    def _receive(self, now: float, socket: "zmq.Socket[bytes]") -> bool:
        """Receive one message; return whether there was one."""
        try:
            frames = socket.recv_multipart(flags=zmq.NOBLOCK)
        except zmq.Again:
            return False
        message = read_frames(frames) if len(frames) <= FRAMES_MAX else None
        if message is None:
            return True
        self._pause_s = RETRY_S[0]
        if socket is self._replay:
            assert self._attempt is not None
            self._act(self.events.on_replayed(now, self._attempt, message))
        elif not isinstance(message, ReplayEnd):
            effects = self.events.on_live(now, message)
            self._restarted |= any(isinstance(each, Clear) for each in effects)
            self._act(effects)
        return True

    def _act(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Clear):
                # What has not been applied is about blocks that are gone.
                self._effects.clear()
                self._unpacking = None
            self._effects.append(effect)

    def _socket(self, kind: int, messages: int) -> "zmq.Socket[bytes]":
        socket = self._context.socket(kind)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.RCVHWM, messages)
        socket.set(zmq.MAXMSGSIZE, MESSAGE_BYTES_MAX)
        socket.set(zmq.CONNECT_TIMEOUT, _CONNECT_TIMEOUT_MS)
        socket.set(zmq.RECONNECT_IVL, _RECONNECT_MS[0])
        socket.set(zmq.RECONNECT_IVL_MAX, _RECONNECT_MS[1])
        socket.set(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS[0])
        socket.set(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_MS[1])
        socket.set(zmq.IPV6, int(":" in self.address.host))
        return socket

    def _watch(self, socket: "zmq.Socket[bytes]") -> None:
        """Wait for the next message. The descriptor is readable at most once between two empty receptions."""
        self._loop.add_reader(socket.fileno(), partial(self._readable, socket))

    def _unwatch(self, socket: "zmq.Socket[bytes]") -> None:
        self._loop.remove_reader(socket.fileno())

    def _readable(self, socket: "zmq.Socket[bytes]") -> None:
        # The descriptor stays readable until the socket is read, which may be some turns later.
        self._unwatch(socket)
        self._on_ready(self)

    def _close_replay(self) -> None:
        self._attempt = None
        if self._replay is not None:
            self._unwatch(self._replay)
            self._replay.close(linger=0)
            self._replay = None


def _addresses(pool: Pool, member: Member, profile: EngineProfile) -> list[_Address]:
    """Return the publishers of a member: those that its engine says, else the one of the pool's specification."""
    events = pool.engine.kv_events
    address = partial(
        _Address,
        pool=pool.id,
        member=member.id,
        endpoint=member.endpoint,
        incarnation=member.incarnation,
        host=member.address,
    )
    if not profile.event_sources:
        return [address(rank=0, port=events.port, replay_port=events.replay_port, topic=events.topic)]
    return [
        address(
            rank=source.rank,
            port=source.port or events.port + source.rank,
            replay_port=source.replay_port,
            topic=source.topic,
        )
        for source in profile.event_sources[:RANKS_MAX]
    ]


def _process(member: Member) -> tuple[str, str]:
    return member.endpoint, member.incarnation


def _endpoint(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
