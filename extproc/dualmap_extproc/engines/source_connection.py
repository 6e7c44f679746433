"""The connection to one publisher of KV events: one SUB socket, and for each replay a new DEALER socket."""

import asyncio
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final, NamedTuple

from dualmap.engines.events import Batch, Unreadable
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
)
from dualmap_extproc.engines.event_messages import slices
from dualmap_extproc.engines.zmtp import ProtocolError, ZmtpConnection
from dualmap_extproc.engines.zmtp_socket import ZmtpSocket

CONNECT_S: Final = 3.0
"""A connection that is not open after this time is closed."""
RETRY_S: Final = (0.5, 10.0)
"""The shortest and the longest pause after a lost connection; each pause without a message between is twice as long."""
LOG_S: Final = 60.0
"""A source that fails again is logged again after it was live for this time since the last log line."""
# In the other states, a reason is about lost messages.
_NOT_CONNECTED: Final = frozenset((SourceState.CONNECTING, SourceState.FAILED))
# What a waiting message takes beside its payload.
_MESSAGE_BYTES: Final = 256


class Publisher(NamedTuple):
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


class SourceConnection:
    """One publisher: its sockets, and the effects that are not yet applied."""

    def __init__(
        self, address: Publisher, loop: asyncio.AbstractEventLoop, on_ready: Callable[["SourceConnection"], None]
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
        # What was logged, and when. Another gap of a source that is already partial is not logged.
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
            self.fail(f"the subscription failed: {failure_of(error)}", retry_s=now + RETRY_S[1])
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
            self.events.on_waiting(f"{self._place}: {failure_of(error)}")
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
            self._on_replay_problem(failure_of(error))
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


def failure_of(error: Exception) -> str:
    """Return what happened to a connection, such as "connection refused"."""
    return error.strerror.lower() if isinstance(error, OSError) and error.strerror else str(error)
