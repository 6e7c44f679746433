"""Follows one source of KV events: decides which messages are applied, in which order, and which are requested again.

A source is the publisher of one rank of a member. Each message has a number, from 0 on in each life of the engine. A
subscriber misses the messages before its subscription, and messages that the publisher drops. A second socket replays
old messages from a given number on, ended by a mark. A replay can lack messages at its front (the publisher has
forgotten them) and in its middle (its socket dropped them), and its end can be missing.

Two numbers describe the position: ``due`` is the next number to apply, and ``heard`` is the last live number. A live
number above ``due`` is a gap. A live number up to ``heard`` means that the engine restarted. A live number between them
is already known from a replay. The steps after a subscription or a gap:

1. Live messages wait in a queue. A replay is requested from ``due`` on, if the publisher has one.
2. Each answer is applied if its number is ``due``. If the first answer is above ``due``, the messages before are lost:
   the source is partial, and the answer is applied. A later answer above ``due`` is a hole, which ends the attempt.
3. After a hole or a silence, another attempt starts on a new socket, because answers to the old request may still come.
   After three attempts without progress the source is partial, and requests no replay for 30 s. Numbers without order
   look like restarts and gaps: after three of them in succession, the source requests no replay for 30 s, too.
4. After the mark, or after the last attempt, the queue is applied.

A partial source remains partial until the engine's next life. Its live messages are applied.

An engine that sleeps has emptied its cache, and may never report that. Its earlier messages are never applied again.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Final

SILENCE_S: Final = 2.0
"""An attempt without an answer for this time has failed."""
RETRY_S: Final = 0.1
"""The pause before another attempt."""
ATTEMPTS_MAX: Final = 3
"""The most attempts without progress."""
REPLAY_S: Final = 120.0
"""The longest time of all attempts together, because a publisher could answer without end."""
REPLAYS_IN_SUCCESSION: Final = 3
"""The most replays after restarts and gaps that follow each other within ``BACKOFF_S``, if none of them ends."""
BACKOFF_S: Final = 30.0
"""After failed attempts, the source requests no replay for this time, and up to twice this time by its jitter."""
JITTER_S: Final = 1.0
"""The first replay starts within this time, because all routers subscribe to a new engine at once."""
REPLAYS_MAX: Final = 8
"""The most sources of a router that begin a replay within ``PLACE_S``."""
PLACE_S: Final = 5.0
"""A replay delays other sources for this time at most, because a slow publisher could delay them for minutes."""
QUEUE_MESSAGES: Final = 10000
"""The most live messages that wait for the end of a replay; further messages are requested again."""
QUEUE_BYTES: Final = 16777216
"""The most bytes of live messages that wait for the end of a replay; further messages are requested again."""
MESSAGE_BYTES_MAX: Final = 4194304
"""The largest message; a larger one leaves a gap."""

_NUMBER_BYTES: Final = 8
_END_NUMBER: Final = b"\xff" * _NUMBER_BYTES
# Numbers are counted from 0. An engine could use the negative ones for other kinds of messages.
_NUMBER_MAX: Final = (1 << 63) - 1


class SourceState(StrEnum):
    """What a source knows of its engine's cache."""

    OFF = "Off"
    CONNECTING = "Connecting"
    SYNCING = "Syncing"
    LIVE = "Live"
    PARTIAL = "Partial"
    FAILED = "Failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceStatus:
    """The state of a source, the number of the last applied message, and its gaps and replays so far."""

    state: SourceState = SourceState.OFF
    sequence: int | None = None
    gaps: int = 0
    resyncs: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Message:
    """A message with its number; the payload is still packed."""

    number: int
    payload: bytes


class ReplayEnd(Enum):
    """The mark at the end of a replay."""

    END = "end"


@dataclass(frozen=True, slots=True)
class Apply:
    """Unpack the message and apply its events."""

    message: Message


@dataclass(frozen=True, slots=True)
class Clear:
    """Forget all blocks of the source's rank."""


@dataclass(frozen=True, slots=True)
class ForgetCopies:
    """Count one copy of each block of the source's rank: lost messages may have removed the others."""


Effect = Apply | Clear | ForgetCopies


@dataclass(frozen=True, slots=True)
class Replay:
    """Request a replay from number ``start`` on, on a new socket. Pass ``attempt`` back with each answer."""

    attempt: int
    start: int


def read_frames(frames: Sequence[bytes]) -> Message | ReplayEnd | None:
    """Return the message of a live message's or a replay answer's frames, None if they are not one.

    The frames before the number differ between releases, so the frames are read from the back.
    """
    if len(frames) < 2 or len(frames[-2]) != _NUMBER_BYTES or len(frames[-1]) > MESSAGE_BYTES_MAX:
        return None
    if frames[-2] == _END_NUMBER:
        return None if frames[-1] else ReplayEnd.END
    number = int.from_bytes(frames[-2], "big")
    return None if number > _NUMBER_MAX else Message(number, frames[-1])


class EventSource:
    """The state machine of one source.

    ``replays`` tells whether the publisher has a socket for replays. ``jitter`` (0 to 1) differs between routers and
    members. Methods return what to do with the blocks of the rank, in order. After each call, ``replay_wanted_s`` is
    the time from which a replay is wanted (None: not wanted), and ``attempt`` is the running replay (None: none; a
    socket of another attempt can be closed).
    """

    def __init__(self, *, replays: bool, jitter: float = 0.0) -> None:
        self.gaps = 0
        self.resyncs = 0
        self.attempt: int | None = None
        self.replay_wanted_s: float | None = None
        self._replays = replays
        self._jitter = jitter
        self._phase = SourceState.OFF
        self._failure = ""
        self._waiting = ""
        self._missing = ""
        self._replay_problem = ""
        self._due = 0
        self._heard = -1
        # The messages before this number are older than the engine's last sleep.
        self._first = 0
        self._asleep = False
        # Whether the engine slept during the present replay.
        self._outdated = False
        self._queue: deque[Message] = deque()
        self._queued_bytes = 0
        self._attempts = 0
        self._is_first_answer = True
        self._progressed = False
        self._fruitless = 0
        self._silent_s = 0.0
        # The time until which the attempt delays other sources.
        self._place_s = 0.0
        # The time at which all attempts together end; None before the first attempt.
        self._last_s: float | None = None
        self._no_replay_before_s = float("-inf")
        # The replays in succession, the time of the last one, and that of the last restart.
        self._succession = 0
        self._wanted_s = float("-inf")
        self._restarted_s = float("-inf")

    @property
    def state(self) -> SourceState:
        """The state for status pages and metrics."""
        return SourceState.PARTIAL if self._phase is SourceState.LIVE and self._missing else self._phase

    @property
    def reason(self) -> str:
        """Why the source is failed or partial, or why it waits, else the empty string."""
        if self._phase is SourceState.FAILED:
            return self._failure
        return self._waiting if self._phase is SourceState.CONNECTING else self._missing

    @property
    def status(self) -> SourceStatus:
        """The state for status pages and metrics, as a value."""
        return SourceStatus(
            state=self.state, sequence=self.sequence, gaps=self.gaps, resyncs=self.resyncs, reason=self.reason
        )

    @property
    def sequence(self) -> int | None:
        """The number of the last applied message, None before the first one."""
        return self._due - 1 if self._due else None

    @property
    def queued_messages(self) -> int:
        """The number of live messages that wait for the end of a replay."""
        return len(self._queue)

    @property
    def queued_bytes(self) -> int:
        """The bytes of the live messages that wait for the end of a replay."""
        return self._queued_bytes

    @property
    def next_deadline(self) -> float | None:
        """The time at which ``on_deadline`` must be called, None if there is none."""
        return self._silent_s if self.attempt is not None else None

    def connect(self) -> None:
        """Wait for a connection to the publisher, also after a failure. The position is kept."""
        if self._phase is SourceState.FAILED:
            self._waiting = self._failure
        self._phase = SourceState.CONNECTING

    def on_waiting(self, reason: str) -> None:
        """Take the reason for which there is no connection, or no message."""
        self._waiting = reason

    def on_replay_problem(self, reason: str) -> None:
        """Take the reason for which a replay has no answers; an answer ends it."""
        self._replay_problem = reason

    def start(self, now: float) -> None:
        """Begin after a subscription, also after a failure. The position is kept."""
        self.connect()
        if self._may_replay(now):
            self._want_replay(now, now + self._jitter * JITTER_S)

    def on_failed(self, reason: str) -> None:
        """Stop, because the subscription failed. The blocks are kept for the next start."""
        self._phase = SourceState.FAILED
        self._failure = reason
        self._end_replay()

    def on_live(self, now: float, message: Message) -> list[Effect]:
        """Return the effects of a live message."""
        if self._phase in (SourceState.OFF, SourceState.FAILED):
            return []
        effects: list[Effect] = []
        # A publisher sends each number once in a life. Before the first live number, an engine that restarts while it
        # is idle shows itself by number 0.
        if message.number <= self._heard or (message.number == 0 and self._due):
            effects = self.on_restart(now)
        self._heard = message.number
        if self._phase is SourceState.SYNCING:
            self._enqueue(message)
            return effects
        self._phase = SourceState.LIVE
        return effects + self._follow(now, message)

    def on_restart(self, now: float) -> list[Effect]:
        """Return the effects of another life of the engine, such as one with a later start time."""
        self._forget_life()
        self._end_replay()
        self._restarted_s = now
        if self._phase not in (SourceState.OFF, SourceState.FAILED):
            self._phase = SourceState.CONNECTING
            if self._may_replay(now):
                self._want_replay(now, now + RETRY_S)
        return [Clear()]

    def on_refused(self) -> list[Effect]:
        """Return the effects of a connection that was refused: the process that published before has ended."""
        known = self._due > 0
        self._forget_life()
        return [Clear()] if known else []

    def on_lost(self) -> list[Effect]:
        """Return the effects of a driver that lost messages it had not applied. The next start requests them again."""
        self._due = self._first
        return [Clear()]

    def on_sleep(self) -> list[Effect]:
        """Return the effects of an engine that sleeps. Until ``on_wake``, all that a replay brings is older as well."""
        self._asleep = self._outdated = True
        self._first = self._due = max(self._due, self._heard + 1)
        self._missing = ""
        self._queue.clear()
        self._queued_bytes = 0
        return [Clear()]

    def on_wake(self) -> None:
        """Apply replayed messages again: the engine no longer sleeps."""
        self._asleep = False

    def on_unreadable(self, reason: str) -> list[Effect]:
        """Return the effects of an applied message that the router cannot read: its removals are unknown."""
        self._missing = reason
        return [Clear()]

    def begin_replay(self, now: float) -> Replay:
        """Begin the wanted replay. Without an answer until ``next_deadline``, the attempt ends."""
        self._attempts += 1
        self.attempt = self._attempts
        self.replay_wanted_s = None
        self._is_first_answer = True
        self._progressed = False
        self._outdated = self._asleep
        self._silent_s = now + SILENCE_S
        self._place_s = now + PLACE_S
        if self._last_s is None:
            self._last_s = now + REPLAY_S
        return Replay(attempt=self._attempts, start=self._due)

    def on_replayed(self, now: float, attempt: int, answer: Message | ReplayEnd) -> list[Effect]:
        """Return the effects of an answer to a replay; answers to earlier attempts have none."""
        if attempt != self.attempt:
            return []
        self._silent_s = now + SILENCE_S
        self._replay_problem = ""
        if isinstance(answer, ReplayEnd):
            return self._end_attempt(now, complete=True)
        is_first, self._is_first_answer = self._is_first_answer, False
        effects: list[Effect] = []
        if answer.number == self._due or (is_first and answer.number > self._due):
            if self._outdated:
                self._first = self._due = answer.number + 1
            else:
                effects = self._skip_to(answer.number) + self._apply(answer)
            self._progressed = True
        elif answer.number > self._due:
            return self._end_attempt(now, complete=False)
        if self._last_s is not None and now >= self._last_s:
            return effects + self._end_attempt(now, complete=False)
        return effects

    def on_deadline(self, now: float) -> list[Effect]:
        """Return the effects of a silent replay."""
        if self.attempt is None or now < self._silent_s:
            return []
        return self._end_attempt(now, complete=False)

    def delays_others(self, now: float) -> bool:
        """Return whether the source replays and has begun lately."""
        return self.attempt is not None and now < self._place_s

    def _forget_life(self) -> None:
        self._due = self._first = 0
        self._heard = -1
        self._asleep = self._outdated = False
        self._missing = ""

    def _may_replay(self, now: float) -> bool:
        if now >= self._wanted_s + BACKOFF_S:
            self._succession = 0
        if self._succession >= REPLAYS_IN_SUCCESSION:
            self._replay_problem = self._replay_problem or "too many restarts and gaps in succession"
            self._back_off(now)
        return self._replays and now >= self._no_replay_before_s

    def _back_off(self, now: float) -> None:
        self._succession = 0
        self._no_replay_before_s = now + BACKOFF_S * (1.0 + self._jitter)

    def _want_replay(self, now: float, wanted_s: float) -> None:
        self._succession += 1
        self._wanted_s = now
        self._phase = SourceState.SYNCING
        self.replay_wanted_s = wanted_s
        self._fruitless = 0
        self._last_s = None
        self.resyncs += 1

    def _end_replay(self) -> None:
        self.attempt = None
        self.replay_wanted_s = None
        self._queue.clear()
        self._queued_bytes = 0

    def _enqueue(self, message: Message) -> None:
        """Queue a live message. Above the bound it is lost, which ``_drain`` finds as a gap."""
        size = len(message.payload)
        if len(self._queue) < QUEUE_MESSAGES and self._queued_bytes + size <= QUEUE_BYTES:
            self._queue.append(message)
            self._queued_bytes += size

    def _follow(self, now: float, message: Message) -> list[Effect]:
        """Return the effects of a live message while no replay runs."""
        if message.number < self._due:
            return []
        if message.number > self._due:
            # At the start of a subscription, earlier messages are expected.
            self.gaps += self._due > 0
            if self._may_replay(now):
                self._want_replay(now, now)
                self._enqueue(message)
                return []
        elif message.number == 0:
            # The source hears this life of the engine from its beginning.
            self._missing = ""
        return self._skip_to(message.number) + self._apply(message)

    def _skip_to(self, number: int) -> list[Effect]:
        """Give up the messages before a number, if any are missing."""
        if number == self._due:
            return []
        self._missing = self._with_problem(f"messages {self._due} to {number - 1} are lost")
        # Before the first message, there are no blocks.
        return [ForgetCopies()] if self._due else []

    def _apply(self, message: Message) -> list[Effect]:
        self._due = message.number + 1
        return [Apply(message)]

    def _end_attempt(self, now: float, *, complete: bool) -> list[Effect]:
        """End an attempt; want another one, or drain the queue."""
        self.attempt = None
        effects = self._drain(skip=False) if complete else []
        if complete and not self._is_behind():
            self._phase = SourceState.LIVE
            if now >= self._restarted_s + BACKOFF_S:
                self._succession = 0
            return effects
        self._fruitless = 0 if self._progressed or effects else self._fruitless + 1
        if self._fruitless < ATTEMPTS_MAX and self._last_s is not None and now < self._last_s:
            self.replay_wanted_s = now + RETRY_S
            return effects
        self._phase = SourceState.LIVE
        self._back_off(now)
        self._missing = self._missing or self._with_problem("the publisher's replay is incomplete")
        return effects + self._drain(skip=True)

    def _drain(self, *, skip: bool) -> list[Effect]:
        """Apply the queue, with ``skip`` also behind a gap."""
        effects: list[Effect] = []
        while self._queue:
            message = self._queue[0]
            if message.number > self._due:
                if not skip:
                    break
                effects += self._skip_to(message.number)
            self._queue.popleft()
            self._queued_bytes -= len(message.payload)
            if message.number >= self._due:
                effects += self._apply(message)
        return effects

    def _with_problem(self, text: str) -> str:
        return f"{text} ({self._replay_problem})" if self._replay_problem else text

    def _is_behind(self) -> bool:
        """Return whether live messages were heard that are not applied."""
        return self._due <= self._heard


def replays_to_begin(now: float, sources: Iterable[EventSource]) -> list[EventSource]:
    """Return the sources whose replay can begin now, the longest waiting first, within ``REPLAYS_MAX``."""
    every = list(sources)
    free = REPLAYS_MAX - sum(source.delays_others(now) for source in every)
    wanted = sorted(
        (
            (source.replay_wanted_s, number)
            for number, source in enumerate(every)
            if source.replay_wanted_s is not None and source.replay_wanted_s <= now
        )
    )
    return [every[number] for _, number in wanted[: max(free, 0)]]
