"""The ext_proc service in grpc.aio: passes messages to each stream's state machine and writes the answers."""

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from dualmap_extproc.names import EXT_PROC_METHOD, EXT_PROC_SERVICE
from dualmap_extproc.request.buffered import BufferedBodies
from dualmap_extproc.request.observations import Decided, Report
from dualmap_extproc.request.picker import Picker
from dualmap_extproc.request.reading import Reader
from dualmap_extproc.request.stream import Stream
from dualmap_extproc.request.tokens import TokenSources
from dualmap_extproc.settings import Limits
from dualmap_extproc.wire import ext_proc_pb2 as wire
from dualmap_extproc.wire.peer import peer_of

_Context: TypeAlias = "grpc.aio.ServicerContext[wire.ProcessingRequest, wire.ProcessingResponse]"
Handler: TypeAlias = "grpc.GenericRpcHandler[Any, Any]"

_EOF: Final[Any] = grpc.aio.EOF  # type: ignore[attr-defined] # grpc-stubs declares only the type
# The poll interval of streams' deadlines. Deadlines are at least 0.1 s away, and only requests with trailers or slow
# clients reach them.
_POLL_S: Final = 0.02
# The longest time for which one poll calls streams. The other streams wait for the event loop's next turn.
_POLL_BUSY_S: Final = 0.005


class ExternalProcessor:
    """The ext_proc service: one state machine per stream, driven by the clock of the event loop.

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
        self._deadlines = _StreamDeadlines()
        self._streams = 0
        self._last_began_s = -math.inf
        self._idle = asyncio.Event()
        self._idle.set()

    def handler(self) -> Handler:
        """Return the service's handler, for registration in grpc.aio."""
        method = grpc.stream_stream_rpc_method_handler(
            self._process,
            request_deserializer=wire.ProcessingRequest.FromString,
            response_serializer=wire.ProcessingResponse.SerializeToString,
        )
        return grpc.method_handlers_generic_handler(EXT_PROC_SERVICE, {EXT_PROC_METHOD: method})

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
        self._picker.stop_queueing(asyncio.get_running_loop().time())

    async def _process(self, _: object, context: _Context) -> None:
        """Serve one stream, and close its state machine after any end of the stream."""
        clock = asyncio.get_running_loop().time
        writer = _UnpromptedWriter(context)
        stream = Stream(
            *(self._picker, self._limits, writer.write, self._buffered, self._reader),
            tokens=self._tokens,
            peer=peer_of(context),
        )
        writer.on_written = stream.written
        cancelled = True
        self._streams += 1
        self._last_began_s = clock()
        self._idle.clear()
        try:
            while not stream.ended:
                message = await context.read()
                if writer.writing is not None:
                    await writer.writing
                if message is _EOF:
                    break
                now = clock()
                undecided = not stream.decided
                answers = stream.receive(now, message)
                if undecided and stream.decided:
                    done_s = clock()
                    self._report(Decided(now=done_s, seconds=done_s - now))
                for answer in answers:
                    await context.write(answer)
                stream.written()
                # The next message may come much later; what this one and its answers contain is not stored until then.
                del message, answers
                self._deadlines.watch(stream, writer)
            cancelled = False
        except DecodeError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        finally:
            self._deadlines.forget(stream)
            stream.close(clock(), cancelled=cancelled)
            writer.cancel()
            self._streams -= 1
            if not self._streams:
                self._idle.set()


class _UnpromptedWriter:
    """The writer of answers without a preceding message: after a stream's deadline or a queued request's decision.

    The stream's handler awaits the next message meanwhile. gRPC accepts only one write at a time, so the handler must
    await ``writing`` before it writes anything.
    """

    def __init__(self, context: _Context) -> None:
        self._context = context
        self.writing: asyncio.Task[None] | None = None
        self.on_written: Callable[[], None] = lambda: None

    def write(self, answers: Sequence[wire.ProcessingResponse]) -> None:
        """Start to write answers after the current write ends."""
        self.writing = asyncio.create_task(self._write(answers, after=self.writing))
        # If the call ends meanwhile, the write fails. The handler also detects the end, so the callback drops the
        # error.
        self.writing.add_done_callback(lambda task: task.cancelled() or task.exception())

    def cancel(self) -> None:
        """Stop writing, because the stream has ended."""
        if self.writing is not None:
            self.writing.cancel()

    async def _write(self, answers: Sequence[wire.ProcessingResponse], after: asyncio.Task[None] | None) -> None:
        if after is not None:
            await after
        for answer in answers:
            await self._context.write(answer)
        self.on_written()


class _StreamDeadlines:
    """The deadlines of streams: a stream is called if its deadline passes before its next message arrives.

    One timer checks all deadlines 50 times a second while there are any, and pauses if many streams are due at once.
    Nearly every request sets a deadline, but few requests reach their deadline. A timer for each request would cost
    6 us per request. If an answer ends its stream (a rejection), Envoy closes the call, so the handler's read returns.
    """

    def __init__(self) -> None:
        self._watched: dict[Stream, _UnpromptedWriter] = {}
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, stream: Stream, writer: _UnpromptedWriter) -> None:
        """Watch the stream if it has a deadline; ``writer`` writes the answers at this deadline."""
        if stream.deadline_s is not None:
            self._watched[stream] = writer
            if self._timer is None:
                self._set_timer()

    def forget(self, stream: Stream) -> None:
        """Stop watching a stream."""
        self._watched.pop(stream, None)

    def _poll(self) -> None:
        clock = asyncio.get_running_loop().time
        now = clock()
        pause_s = _POLL_S
        for stream, writer in tuple(self._watched.items()):
            if stream.deadline_s is None:
                self.forget(stream)
            elif stream.deadline_s <= now:
                answers = stream.on_deadline(now)
                if answers:
                    writer.write(answers)
                if clock() - now > _POLL_BUSY_S:
                    pause_s = 0.0
                    break
        self._timer = None
        if self._watched:
            self._set_timer(pause_s)

    def _set_timer(self, pause_s: float = _POLL_S) -> None:
        self._timer = asyncio.get_running_loop().call_later(pause_s, self._poll)
