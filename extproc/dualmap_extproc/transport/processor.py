"""The ext_proc service, shared by both transports: its streams, their number, and their deadlines.

``grpc_processor`` and ``http2_processor`` pass messages between a transport and the streams of this module.
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from dualmap_edge.logs import get_logger, place_of
from dualmap_extproc.request.buffered import BufferedBodies
from dualmap_extproc.request.observations import Decided, Report
from dualmap_extproc.request.picker import Picker
from dualmap_extproc.request.reading import Reader
from dualmap_extproc.request.stream import Stream
from dualmap_extproc.request.tokens import TokenSources
from dualmap_extproc.settings import Limits

_log = get_logger(__name__)

Answers: TypeAlias = Sequence[bytes]
Write: TypeAlias = Callable[[Answers], None]

# The poll interval of streams' deadlines. Deadlines are at least 0.1 s away, and only requests with trailers or slow
# clients reach them.
_POLL_S: Final = 0.02
# The longest time for which one poll calls streams. The other streams wait for the event loop's next turn.
_POLL_BUSY_S: Final = 0.005


class ExternalProcessor:
    """The open streams of the ext_proc service: one state machine per stream, driven by the event loop's clock.

    A transport calls ``open`` when a call begins, ``receive`` for each of its messages, and ``close`` once after the
    call's end.
    ``reader`` reads large bodies; without one, the streams read them on the event loop. ``tokens`` gives token ids.
    """

    def __init__(
        self,
        picker: Picker,
        report: Report,
        limits: Limits,
        reader: Reader | None = None,
        tokens: TokenSources | None = None,
    ) -> None:
        self._picker = picker
        self._reader = reader
        self._tokens = tokens
        self._buffered = BufferedBodies(limits.buffered_bytes)
        self._report = report
        self._limits = limits
        self._clock = asyncio.get_running_loop().time
        self._deadlines = _StreamDeadlines()
        self._streams = 0
        self._last_began_s = -math.inf
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def open_requests(self) -> int:
        """The number of open streams; Envoy may still send messages about their requests."""
        return self._streams

    @property
    def last_began_s(self) -> float:
        """The time at which the last stream began, on the event loop's clock; minus infinity before the first."""
        return self._last_began_s

    @property
    def buffered_bytes(self) -> int:
        """The bytes of all request bodies that the router stores."""
        return self._buffered.held_bytes

    async def idle(self) -> None:
        """Wait until no stream is open."""
        await self._idle.wait()

    def stop_queueing(self) -> None:
        """Dispatch or reject all queued requests, and queue no further requests."""
        self._picker.stop_queueing(self._clock())

    def open(self, write: Write, peer: str) -> Stream:
        """Return the state machine of a new stream of the client ``peer``.

        ``write`` sends the answers that follow no message: after a decision about a queued request.
        """
        self._streams += 1
        self._last_began_s = self._clock()
        self._idle.clear()
        return Stream(
            *(self._picker, self._limits, write, self._buffered, self._reader), tokens=self._tokens, peer=peer
        )

    def receive(self, stream: Stream, now: float, data: bytes | memoryview) -> Answers:
        """Return a stream's encoded answers to an encoded message. The transport calls ``watch`` after sending them.

        Raises DecodeError if ``data`` is no message.
        """
        if stream.decided:
            return stream.receive(now, data)
        # The message may have waited for others that arrived together with it.
        began_s = self._clock()
        answers = stream.receive(now, data)
        if stream.decided:
            done_s = self._clock()
            self._report(Decided(now=done_s, seconds=done_s - began_s))
        return answers

    def watch(self, stream: Stream, write: Write) -> None:
        """Call the stream at its deadline, if it has one; ``write`` sends the answers."""
        self._deadlines.watch(stream, write)

    def close(self, stream: Stream, now: float, *, cancelled: bool) -> None:
        """Report the end of a stream. ``cancelled`` is true if Envoy or its client cancelled, or the call failed."""
        self._deadlines.forget(stream)
        stream.close(now, cancelled=cancelled)
        self._streams -= 1
        if not self._streams:
            self._idle.set()


class _StreamDeadlines:
    """The deadlines of streams: a stream is called if its deadline passes before its next message arrives.

    One timer checks all deadlines 50 times a second while there are any, and pauses if many streams are due at once.
    Nearly every request sets a deadline, but few requests reach their deadline. A timer for each request would cost
    6 us per request. If an answer ends its stream (a rejection), Envoy closes the call.
    """

    def __init__(self) -> None:
        self._watched: dict[Stream, Write] = {}
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, stream: Stream, write: Write) -> None:
        """Watch the stream if it has a deadline; ``write`` writes the answers at this deadline."""
        if stream.deadline_s is not None:
            self._watched[stream] = write
            if self._timer is None:
                self._set_timer()

    def forget(self, stream: Stream) -> None:
        """Stop watching a stream."""
        self._watched.pop(stream, None)

    def _poll(self) -> None:
        clock = asyncio.get_running_loop().time
        now = clock()
        pause_s = _POLL_S
        for stream, write in tuple(self._watched.items()):
            if stream.deadline_s is None:
                self.forget(stream)
            elif stream.deadline_s <= now:
                self._end(stream, write, now)
                if clock() - now > _POLL_BUSY_S:
                    pause_s = 0.0
                    break
        self._timer = None
        if self._watched:
            self._set_timer(pause_s)

    def _end(self, stream: Stream, write: Write, now: float) -> None:
        """Apply the deadline of a stream. An error must not end the deadlines of the other streams."""
        try:
            answers = stream.on_deadline(now)
            if answers:
                write(answers)
        except Exception as error:  # noqa: BLE001
            self.forget(stream)
            _log.error("Unexpected error at a deadline", error=type(error).__name__, place=place_of(error))

    def _set_timer(self, pause_s: float = _POLL_S) -> None:
        self._timer = asyncio.get_running_loop().call_later(pause_s, self._poll)
