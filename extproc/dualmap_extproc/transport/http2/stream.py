"""A stream with its gRPC call: messages in and out, and its end."""

from collections import deque
from struct import Struct
from typing import Final, Protocol

from dualmap_extproc.transport.http2 import frames
from dualmap_extproc.transport.http2.calls import CallHandler
from dualmap_extproc.transport.http2.flow import Bucket, Output
from dualmap_extproc.transport.http2.frames import FRAME_BYTES
from dualmap_extproc.transport.http2.hpack import encode
from dualmap_extproc.transport.http2.limits import Http2Limits
from dualmap_extproc.transport.http2.opening import GRPC_HEADERS, Opening
from dualmap_extproc.transport.http2.status import Status, encoded

# The compression flag and the length before each message.
PREFIX: Final = Struct(">BI")
PREFIX_BYTES: Final = PREFIX.size
_RESPONSE: Final = encode(GRPC_HEADERS)
_OK: Final = encode(((b"grpc-status", b"0"),))
_OPEN: Final = frames.END_HEADERS
_LAST: Final = frames.END_HEADERS | frames.END_STREAM
_RESPONSE_WORD: Final = len(_RESPONSE) << 8 | frames.HEADERS
_OK_WORD: Final = len(_OK) << 8 | frames.HEADERS
_RESET_WORD: Final = frames.NUMBER.size << 8 | frames.RST_STREAM
# Frames that nearly every call sends, each group in one piece: a message's header; the response's headers and a
# message's header; the trailers of a call without error; the same and RST_STREAM.
_MESSAGE: Final = Struct(">IBIBI")
_FIRST_MESSAGE: Final = Struct(f">IBI{len(_RESPONSE)}sIBIBI")
_END: Final = Struct(f">IBI{len(_OK)}s")
_END_RESET: Final = Struct(f">IBI{len(_OK)}sIBII")


class Owner(Protocol):
    """What a stream needs of its connection."""

    now: float
    unfinished_bytes: int
    control: Bucket

    @property
    def peer(self) -> str:
        """The client's identity."""

    @property
    def limits(self) -> Http2Limits:
        """The connection's limits."""

    def stream_closed(self, stream: "Stream") -> None:
        """The stream has sent its end."""

    def stream_overflowed(self, stream: "Stream") -> None:
        """The stream has more unsent bytes than the limits allow."""

    def handler_failed(self, stream: "Stream", error: Exception) -> None:
        """A method of the handler raised an exception."""


class StreamError(Exception):
    """The frame ends its stream with RST_STREAM."""

    def __init__(self, code: frames.ErrorCode) -> None:
        super().__init__(code.name)
        self.code = code


class _Ended:
    """The handler of an ended call. It keeps the call's own handler from being referenced."""

    def message(self, now: float, data: memoryview | bytes) -> None:
        pass

    def half_closed(self, now: float) -> None:
        pass

    def cancelled(self, now: float) -> None:
        pass

    def drained(self) -> None:
        pass


_ENDED: Final = _Ended()
# The queue of streams whose messages never waited.
_NOTHING: Final[deque[memoryview]] = deque(maxlen=0)


class Stream:
    """The HTTP/2 stream of one call. Handlers use it as a ``Call``; the other attributes belong to the connection.

    ``peer_ended`` and ``ended`` are the two sides' ends. An ended stream stays open while messages wait for a window.
    ``partial`` holds the bytes of an incomplete message; it is not None either if the client announced a length, so
    that all DATA frames take the way that counts them.
    """

    __slots__ = (
        "_connection",
        "_content_left",
        "_headers_sent",
        "_need",
        "_opening",
        "_output",
        "_trailers",
        "began_s",
        "ended",
        "handler",
        "id",
        "overflowed",
        "partial",
        "peer_ended",
        "queue",
        "recv_window",
        "send_window",
        "unsent_bytes",
    )

    def __init__(self, connection: Owner, output: Output, stream_id: int, opening: Opening, now: float) -> None:
        self._connection = connection
        self._output = output
        self.id = stream_id
        self._opening = opening
        self.began_s = now
        self.handler: CallHandler = _ENDED
        self.ended = False
        self.peer_ended = False
        self.recv_window = connection.limits.stream_window_bytes
        # The difference to the peer's initial window.
        self.send_window = 0
        self.queue: deque[memoryview] = _NOTHING
        self.unsent_bytes = 0
        # Whether a message did not fit into the limits. The connection resets the stream, so nothing more is sent.
        self.overflowed = False
        self.partial: bytearray | None = None
        self._need = 0
        self._content_left = opening.content_bytes
        self._headers_sent = False
        self._trailers: tuple[Status, str] | None = None
        if opening.content_bytes >= 0:
            self.partial = bytearray()

    @property
    def path(self) -> str:
        """See ``Call``."""
        return self._opening.path

    @property
    def peer(self) -> str:
        """See ``Call``."""
        return self._connection.peer

    def send(self, message: bytes) -> None:
        """See ``Call``."""
        if self.ended or self.overflowed:
            return
        output = self._output
        length = len(message)
        size = length + PREFIX_BYTES
        if (
            self.unsent_bytes
            or size > output.room
            or size > output.window
            or size > self.send_window + output.initial_window
            or size > FRAME_BYTES
        ):
            self._queue(message, size)
        else:
            self.send_window -= size
            output.window -= size
            output.room -= size
            if self._headers_sent:
                head = _MESSAGE.pack(size << 8, 0, self.id, 0, length)
            elif output.fresh:
                self._send_headers()
                head = _MESSAGE.pack(size << 8, 0, self.id, 0, length)
            else:
                self._headers_sent = True
                head = _FIRST_MESSAGE.pack(_RESPONSE_WORD, _OPEN, self.id, _RESPONSE, size << 8, 0, self.id, 0, length)
            output.frames.append(head)
            output.frames.append(message)
        if not output.quiet:
            output.signal()

    def finish(self, status: Status = Status.OK, message: str = "") -> None:
        """See ``Call``."""
        if self.ended or self.overflowed:
            return
        self._end()
        if self.unsent_bytes:
            self._trailers = (status, message)
        else:
            self._close(status, message)

    def data(self, now: float, payload: memoryview, *, last: bool) -> None:
        """Process the payload of a DATA frame without padding.

        Raises StreamError if the payload contradicts ``content-length``.
        """
        end = len(payload)
        if self._content_left >= 0:
            self._content_left -= end
            if self._content_left < 0:
                raise StreamError(frames.ErrorCode.PROTOCOL_ERROR)
        self.peer_ended = last
        at = 0
        while at < end and not self.ended:
            at = self._next(now, payload, at)
        connection = self._connection
        if self.partial and connection.unfinished_bytes > connection.limits.unfinished_bytes:
            self.abort(now, Status.RESOURCE_EXHAUSTED, "too many bytes of unfinished messages")
        if last:
            self.half_close(now)

    def half_close(self, now: float) -> None:
        """The client has ended its side. Raises StreamError if the body contradicts ``content-length``."""
        self.peer_ended = True
        if self._content_left > 0:
            raise StreamError(frames.ErrorCode.PROTOCOL_ERROR)
        if self.partial:
            self.abort(now, Status.INTERNAL, "the stream ended within a message")
            return
        try:
            self.handler.half_closed(now)
        except Exception as error:  # noqa: BLE001  # the failure of a handler ends its call only
            self.fail(now, error)

    def deliver(self, now: float, message: memoryview) -> None:
        """Pass a whole message to the handler."""
        self._connection.control.left += 1
        try:
            self.handler.message(now, message)
        except Exception as error:  # noqa: BLE001  # the failure of a handler ends its call only
            self.fail(now, error)

    def abort(self, now: float, status: Status, text: str) -> None:
        """End the call with an error of the connection's choice."""
        if not (self.ended or self.overflowed):
            handler = self.handler
            self.finish(status, text)
            self._cancel(handler, now)

    def fail(self, now: float, error: Exception) -> None:
        """End the call because its handler raised an exception."""
        self._connection.handler_failed(self, error)
        self.abort(now, Status.INTERNAL, "internal error")

    def cancel(self, now: float) -> None:
        """Drop the stream: nothing more can be sent on it."""
        handler, ended = self.handler, self.ended
        self._end()
        self._output.forget(self)
        if not ended:
            self._cancel(handler, now)

    def queue_empty(self) -> None:
        """All waiting messages are in the output."""
        if self._trailers is not None:
            self._close(*self._trailers)
            return
        try:
            self.handler.drained()
        except Exception as error:  # noqa: BLE001  # the failure of a handler ends its call only
            self.fail(self._connection.now, error)

    def _next(self, now: float, payload: memoryview, at: int) -> int:
        """Process at most one message of a payload; return the position behind the used bytes."""
        end = len(payload)
        partial = self.partial
        if not partial:
            if end - at >= PREFIX_BYTES:
                size = self._accepted(now, payload, at)
                if size is None:
                    return end
                stop = at + PREFIX_BYTES + size
                if stop <= end:
                    self.deliver(now, payload[at + PREFIX_BYTES : stop])
                    return stop
                self._need = PREFIX_BYTES + size
            self.partial = bytearray(payload[at:])
            self._connection.unfinished_bytes += end - at
            return end
        if len(partial) < PREFIX_BYTES:
            at = self._append(partial, payload, at, PREFIX_BYTES)
            if len(partial) < PREFIX_BYTES:
                return end
            size = self._accepted(now, partial, 0)
            if size is None:
                return end
            self._need = PREFIX_BYTES + size
        at = self._append(partial, payload, at, self._need)
        if len(partial) == self._need:
            self._drop_partial()
            self.deliver(now, memoryview(partial)[PREFIX_BYTES:])
        return at

    def _append(self, partial: bytearray, payload: memoryview, at: int, need: int) -> int:
        """Copy bytes of the payload until the partial message has ``need``; return the position behind them."""
        piece = payload[at : at + need - len(partial)]
        partial += piece
        self._connection.unfinished_bytes += len(piece)
        return at + len(piece)

    def _accepted(self, now: float, prefix: memoryview | bytearray, at: int) -> int | None:
        """Return the size of the message with this prefix. End the call and return None if it is not accepted."""
        compressed, size = PREFIX.unpack_from(prefix, at)
        if compressed:
            self.abort(now, Status.UNIMPLEMENTED, "compressed messages are not supported")
        elif size > self._connection.limits.message_bytes:
            limit = self._connection.limits.message_bytes
            self.abort(now, Status.RESOURCE_EXHAUSTED, f"message of {size} bytes, more than {limit}")
        else:
            return int(size)
        return None

    def _drop_partial(self) -> None:
        if self.partial:
            self._connection.unfinished_bytes -= len(self.partial)
        self.partial = None if self._content_left < 0 else bytearray()
        self._need = 0

    def _queue(self, message: bytes, size: int) -> None:
        """Let a message wait for the windows, or until the adapter takes the output."""
        output, limits = self._output, self._connection.limits
        if (
            self.unsent_bytes + size > limits.unsent_stream_bytes
            or output.unsent_bytes + size > limits.unsent_connection_bytes
        ):
            self.overflowed = True
            self._connection.stream_overflowed(self)
            return
        if not self._headers_sent:
            self._send_headers()
        if not self.unsent_bytes:
            self.queue = deque()
            output.wait(self)
        self.queue.append(memoryview(PREFIX.pack(0, len(message))))
        if message:
            self.queue.append(memoryview(message))
        self.unsent_bytes += size
        output.unsent_bytes += size

    def _send_headers(self) -> None:
        self._headers_sent = True
        self._output.frames.append(frames.headers(self.id, self._output.block(_RESPONSE), 0))

    def _end(self) -> None:
        """No method of the handler may be called from now on."""
        self.ended = True
        self.handler = _ENDED
        if self.partial is not None:
            self._drop_partial()

    def _cancel(self, handler: CallHandler, now: float) -> None:
        try:
            handler.cancelled(now)
        except Exception as error:  # noqa: BLE001  # the failure of a handler ends its call only
            self._connection.handler_failed(self, error)

    def _close(self, status: Status, message: str) -> None:
        """Send the trailers. If the client has not ended its side, also reset the stream, so that it stops sending."""
        output = self._output
        if status is Status.OK and self._headers_sent:
            if self.peer_ended:
                end = _END.pack(_OK_WORD, _LAST, self.id, _OK)
            else:
                end = _END_RESET.pack(_OK_WORD, _LAST, self.id, _OK, _RESET_WORD, 0, self.id, 0)
            output.frames.append(end)
        else:
            fields = [] if self._headers_sent else [*GRPC_HEADERS]
            fields.append((b"grpc-status", b"%d" % status))
            if message:
                fields.append((b"grpc-message", encoded(message)))
            if status is Status.UNIMPLEMENTED:
                # A compressed message gets this status, and the encodings that the server accepts.
                fields.append((b"grpc-accept-encoding", b"identity"))
            output.write_end(self.id, encode(fields), peer_ended=self.peer_ended)
        self._connection.stream_closed(self)
        if not output.quiet:
            output.signal()
