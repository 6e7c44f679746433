"""An HTTP/2 connection of the server: frames in, calls and frames out (RFC 9113)."""

import math
from collections.abc import Callable, Mapping
from typing import Final

from dualmap_extproc.transport.http2 import frames, opening
from dualmap_extproc.transport.http2.calls import Call, Factory
from dualmap_extproc.transport.http2.ended import EndedStreams
from dualmap_extproc.transport.http2.faults import ConnectionFault, above_limit, protocol_error, size_error
from dualmap_extproc.transport.http2.flow import Bucket, Output
from dualmap_extproc.transport.http2.frames import END_STREAM, FRAME_BYTES, HEADER_BYTES, ErrorCode
from dualmap_extproc.transport.http2.header_blocks import DEPENDS_ON_ITSELF, HeaderBlocks
from dualmap_extproc.transport.http2.hpack import Header
from dualmap_extproc.transport.http2.incoming import Incomplete, without_padding
from dualmap_extproc.transport.http2.limits import Http2Counters, Http2Limits
from dualmap_extproc.transport.http2.status import Status
from dualmap_extproc.transport.http2.stream import PREFIX, PREFIX_BYTES, Stream, StreamError

# The least time between two checks of the calls' deadlines (grpc-timeout).
_TIMEOUTS_S: Final = 0.1
_IDLE_PING: Final = b"dualmap?"
_DRAIN_PING: Final = b"dualmap!"


class Http2Connection:
    """One connection. The adapter passes bytes and the time, and writes ``take_output`` to the socket.

    After each ``receive``, ``on_deadline``, ``drain`` and ``on_output``, the adapter takes the output: repeatedly until
    it is empty, or until the socket accepts no more. It then closes the socket if ``closing``, and else asks for
    ``next_deadline``. While the socket accepts no more, messages wait in their streams, and answers to PING go ahead of
    them.
    """

    def __init__(
        self,
        methods: Mapping[bytes, Factory],
        limits: Http2Limits,
        now: float,
        *,
        peer: str,
        counters: Http2Counters,
        on_output: Callable[[], None],
        on_failure: Callable[[Call, Exception], None],
    ) -> None:
        """Begin a connection. ``methods`` has a factory for each path.

        ``on_output`` is called once when output or a deadline appears outside ``receive``, ``on_deadline`` and
        ``drain``; it must only schedule. ``on_failure`` is called with an exception of a handler.
        """
        self.peer: Final = peer
        self.limits: Final = limits
        # The time of the last event.
        self.now = now
        self.unfinished_bytes = 0
        self.control = Bucket(limits.control_burst, limits.control_rate, now)
        self._resets = Bucket(limits.reset_burst, limits.reset_rate, now)
        self._methods = methods
        self._counters = counters
        self._on_failure = on_failure
        self._output = output = Output(limits.output_bytes, on_output)
        self._incomplete = Incomplete()
        self._blocks = HeaderBlocks(limits)
        self._streams: dict[int, Stream] = {}
        self._ended = EndedStreams(limits.ended_ids)
        self._overflowed: list[Stream] = []
        # The streams with a grpc-timeout, and the next time to check them.
        self._timeouts: dict[int, float] = {}
        self._timeouts_s = math.inf
        self._last_id = 0
        self._recv_window = limits.connection_window_bytes
        self._settled = False
        self._began_s = now
        self._heard_s = now
        self._pinged = False
        self._drain_s: float | None = None
        # The last stream id is announced: higher ones are ignored.
        self._final = False
        # No further calls will come: the connection ends with the last call.
        self._ending = False
        self._closing = False
        output.frames.append(
            frames.settings(
                (
                    (frames.MAX_CONCURRENT_STREAMS, limits.streams),
                    (frames.INITIAL_WINDOW_SIZE, limits.stream_window_bytes),
                    (frames.MAX_HEADER_LIST_SIZE, limits.header_list_bytes),
                )
            )
        )
        output.frames.append(frames.window_update(0, limits.connection_window_bytes - frames.WINDOW_INITIAL))

    @property
    def closing(self) -> bool:
        """Whether the connection has ended: the socket is to be closed as soon as the output is written."""
        return self._closing

    @property
    def open_calls(self) -> int:
        """The number of calls that are not ended, or whose messages are not all in the output."""
        return len(self._streams)

    def receive(self, now: float, data: bytes | memoryview) -> None:
        """Process bytes of the peer. No part of ``data`` is used after the return."""
        if self._closing:
            return
        self.now = self._heard_s = now
        self._pinged = False
        self._output.quiet = True
        view = memoryview(data)
        try:
            incomplete = self._incomplete
            if incomplete.rest or not incomplete.prefaced:
                frame, view = incomplete.complete(view)
                self._frames(now, frame)
            at = self._frames(now, view)
            if at < len(view):
                incomplete.rest += view[at:]
        except ConnectionFault as fault:
            self._shut(now, fault.code, fault.text, fault.reason)
        if self._overflowed:
            self._end_overflowed(now)

    def take_output(self) -> bytes:
        """Return the next bytes for the socket, empty if there are none."""
        return self._output.take()

    def next_deadline(self) -> float | None:
        """Return the time at which ``on_deadline`` must be called, None if the connection has ended.

        The time may move in both directions. An earlier time follows from ``receive``, ``drain`` or ``on_output``.
        """
        if self._closing:
            return None
        if self._overflowed:
            return self.now
        limits = self.limits
        due_s = self._heard_s + (limits.silence_s if self._pinged else limits.ping_s)
        if not self._settled:
            due_s = min(due_s, self._began_s + limits.handshake_s)
        if self._drain_s is not None:
            due_s = min(due_s, self._drain_s)
        return min(due_s, self._timeouts_s)

    def on_deadline(self, now: float) -> None:
        """Do what is due at ``now``; nothing if called early."""
        if self._closing:
            return
        self.now = now
        limits = self.limits
        self._output.quiet = True
        self._end_overflowed(now)
        if not self._settled and now >= self._began_s + limits.handshake_s:
            self._shut(now, ErrorCode.SETTINGS_TIMEOUT, "no preface and SETTINGS", "handshake")
        elif now >= self._heard_s + limits.silence_s:
            self._shut(now, ErrorCode.NO_ERROR, "no answer to PING", "silence")
        else:
            if now >= self._heard_s + limits.ping_s and not self._pinged:
                self._pinged = True
                self._output.write_urgent(frames.ping(_IDLE_PING))
            if now >= self._timeouts_s:
                self._end_expired(now)
            if self._drain_s is not None and now >= self._drain_s:
                self._accept_no_more(now)

    def drain(self, now: float) -> None:
        """Announce the end, accept the calls that are already on the way, and close after the last call."""
        if self._closing or self._final or self._drain_s is not None:
            return
        self.now = now
        self._output.quiet = True
        self._counters.goaways["drain"] += 1
        self._drain_s = now + self.limits.drain_ping_s
        self._output.frames.append(frames.goaway(frames.STREAM_MAX, ErrorCode.NO_ERROR, b"drain"))
        self._output.frames.append(frames.ping(_DRAIN_PING))

    def lost(self, now: float) -> None:
        """The socket is closed: cancel all calls."""
        self.now = now
        self._cancel_all(now)

    # What streams need of their connection (``stream.Owner``).

    def stream_closed(self, stream: Stream) -> None:
        """The stream has sent its end."""
        self.control.left += self.limits.control_per_call
        self._forget(stream, both=stream.peer_ended)

    def stream_overflowed(self, stream: Stream) -> None:
        """The stream has more unsent bytes than the limits allow. It is reset after the present event."""
        self._overflowed.append(stream)

    def handler_failed(self, stream: Stream, error: Exception) -> None:
        """A method of the handler raised an exception."""
        self._counters.failed_handlers += 1
        self._on_failure(stream, error)

    # Bytes to frames.

    def _frames(self, now: float, view: memoryview) -> int:
        """Process all whole frames; return the position behind them. Raises ConnectionFault."""
        streams = self._streams
        unpack = frames.HEADER.unpack_from
        unpack_prefix = PREFIX.unpack_from
        blocks = self._blocks
        message_bytes = self.limits.message_bytes
        half_window = self.limits.stream_window_bytes // 2
        received = messages = at = 0
        end = len(view)
        while at + HEADER_BYTES <= end:
            word, flags, stream_id = unpack(view, at)
            start = at + HEADER_BYTES
            length = word >> 8
            stop = start + length
            if length > FRAME_BYTES:
                raise size_error("frame above SETTINGS_MAX_FRAME_SIZE")
            if stop > end:
                break
            at = stop
            kind = word & 0xFF
            if kind:
                self._frame(now, kind, flags, stream_id & frames.STREAM_MAX, view[start:stop])
            else:
                received += length
                # The usual frame: without padding, on an open stream, one or more whole messages of one.
                if flags <= END_STREAM and length >= PREFIX_BYTES and not blocks.stream_id:
                    stream = streams.get(stream_id)
                    if (
                        stream is not None
                        and stream.partial is None
                        and not stream.ended
                        and not stream.peer_ended
                        and stream.recv_window >= half_window + length
                    ):
                        compressed, size = unpack_prefix(view, start)
                        if size == length - PREFIX_BYTES and not compressed and size <= message_bytes:
                            stream.recv_window -= length
                            messages += 1
                            if flags:
                                stream.peer_ended = True
                            try:
                                stream.handler.message(now, view[start + PREFIX_BYTES : stop])
                            except Exception as error:  # noqa: BLE001  # the failure of a handler ends its call only
                                stream.fail(now, error)
                            if flags:
                                stream.half_close(now)
                            continue
                self._data(now, flags, stream_id & frames.STREAM_MAX, view[start:stop])
        if messages:
            self.control.left += messages
        if received:
            self._count_received(received)
        return at

    def _frame(self, now: float, kind: int, flags: int, stream_id: int, payload: memoryview) -> None:
        block_stream = self._blocks.stream_id
        if block_stream and (kind != frames.CONTINUATION or stream_id != block_stream):
            raise protocol_error("frame within a header block")
        if not self._settled and kind != frames.SETTINGS:
            raise protocol_error("the first frame is not SETTINGS")
        if kind < len(_HANDLERS):
            _HANDLERS[kind](self, now, flags, stream_id, payload)
        else:
            self._count_control(now)

    # Frames of streams.

    def _headers(self, now: float, flags: int, stream_id: int, payload: memoryview) -> None:
        if flags & ~END_STREAM == frames.END_HEADERS:
            block = bytes(payload)
            known = self._blocks.openings.get(block)
            if known is not None and stream_id > self._last_id and stream_id & 1:
                self._open(now, stream_id, known, flags)
            else:
                self._block_complete(now, stream_id, flags, block)
            return
        whole = self._blocks.begin(flags, stream_id, payload)
        if whole is not None:
            self._block_complete(now, stream_id, whole.flags, whole.data)

    def _continuation(self, now: float, flags: int, stream_id: int, payload: memoryview) -> None:
        whole = self._blocks.extend(flags, payload)
        if whole is not None:
            self._block_complete(now, stream_id, whole.flags, whole.data)

    def _block_complete(self, now: float, stream_id: int, flags: int, block: bytes) -> None:
        """Decode a whole header block. Blocks of ignored streams are decoded too: they may change the table."""
        headers, repeatable = self._blocks.decode(block)
        if not stream_id & 1:
            raise protocol_error("HEADERS on a stream that a client cannot open")
        stream = self._streams.get(stream_id)
        if stream is not None:
            self._trailers(now, stream, flags, headers)
        elif stream_id <= self._last_id or self._final:
            self._late_headers(now, stream_id)
        else:
            try:
                asked = opening.read(headers, self._methods)
            except opening.MalformedError:
                asked = None
            if asked is None or flags & DEPENDS_ON_ITSELF:
                self._last_id = stream_id
                self._stream_error(now, stream_id, ErrorCode.PROTOCOL_ERROR, both=bool(flags & END_STREAM))
                return
            if repeatable:
                self._blocks.store(block, asked)
            self._open(now, stream_id, asked, flags)

    def _open(self, now: float, stream_id: int, asked: opening.Opening, flags: int) -> None:
        """Begin the call of a new stream."""
        if self._final:
            return
        self._last_id = stream_id
        last = flags & END_STREAM
        if len(self._streams) >= self.limits.streams:
            self._counters.refused_streams += 1
            self._reset(now, stream_id, ErrorCode.REFUSED_STREAM, both=bool(last))
            return
        if asked.factory is None:
            self._output.write_end(stream_id, asked.refusal, peer_ended=bool(last))
            self._ended.add(stream_id, bool(last))
            self.control.left += self.limits.control_per_call
            return
        stream = self._streams[stream_id] = Stream(self, self._output, stream_id, asked, now)
        if asked.timeout_s is not None:
            expiry_s = self._timeouts[stream_id] = now + asked.timeout_s
            self._timeouts_s = min(self._timeouts_s, expiry_s)
        try:
            handler = asked.factory(stream)
        except Exception as error:  # noqa: BLE001  # the failure of a handler ends its call only
            stream.fail(now, error)
            return
        if not stream.ended:
            stream.handler = handler
            if last:
                self._half_close(now, stream)

    def _trailers(self, now: float, stream: Stream, flags: int, headers: list[Header]) -> None:
        if stream.peer_ended:
            self._stream_error(now, stream.id, ErrorCode.STREAM_CLOSED, both=True)
            return
        try:
            opening.check_trailers(headers)
        except opening.MalformedError:
            flags = 0
        if flags & END_STREAM and not flags & DEPENDS_ON_ITSELF:
            self._half_close(now, stream)
        else:
            self._stream_error(now, stream.id, ErrorCode.PROTOCOL_ERROR, both=False)

    def _late_headers(self, now: float, stream_id: int) -> None:
        if self._ignored(stream_id):
            return
        both = self._ended.ended_by_both(stream_id)
        if both:
            raise ConnectionFault(ErrorCode.STREAM_CLOSED, "HEADERS on a closed stream")
        if both is None and not self._ended.may_be_forgotten(stream_id):
            raise protocol_error("HEADERS with a stream id that is not above the last one")
        self._count_late(now)
        if both is None:
            self._output.frames.append(frames.rst_stream(stream_id, ErrorCode.STREAM_CLOSED))

    def _data(self, now: float, flags: int, stream_id: int, payload: memoryview) -> None:
        """Process a DATA frame of any kind. Its bytes are counted on the connection's window by the caller."""
        if self._blocks.stream_id:
            raise protocol_error("frame within a header block")
        if not self._settled:
            raise protocol_error("the first frame is not SETTINGS")
        length = len(payload)
        payload = without_padding(flags, payload)
        last = flags & END_STREAM
        stream = self._streams.get(stream_id)
        if stream is None:
            self._late_data(now, stream_id, length)
            return
        if stream.peer_ended:
            self._stream_error(now, stream_id, ErrorCode.STREAM_CLOSED, both=True)
            return
        if not payload and not last:
            self._count_control(now)
        stream.recv_window -= length
        window = self.limits.stream_window_bytes
        if stream.recv_window < 0:
            self._stream_error(now, stream_id, ErrorCode.FLOW_CONTROL_ERROR, both=bool(last))
            return
        if stream.recv_window < window // 2 and not last:
            self._output.frames.append(frames.window_update(stream_id, window - stream.recv_window))
            stream.recv_window = window
        try:
            stream.data(now, payload, last=bool(last))
        except StreamError as error:
            self._stream_error(now, stream_id, error.code, both=bool(last))

    def _late_data(self, now: float, stream_id: int, length: int) -> None:
        if self._ignored(stream_id):
            return
        self._check_not_idle(stream_id, "DATA")
        both = self._ended.ended_by_both(stream_id)
        if both:
            raise ConnectionFault(ErrorCode.STREAM_CLOSED, "DATA on a closed stream")
        if length < self.limits.small_update_bytes:
            self._count_late(now)
        else:
            # A client that uploads has a whole window of these frames in flight when its call ends.
            self._counters.late_frames += 1
        if both is None:
            self._output.frames.append(frames.rst_stream(stream_id, ErrorCode.STREAM_CLOSED))

    def _half_close(self, now: float, stream: Stream) -> None:
        try:
            stream.half_close(now)
        except StreamError as error:
            self._stream_error(now, stream.id, error.code, both=True)

    def _priority(self, now: float, flags: int, stream_id: int, payload: memoryview) -> None:
        if not stream_id:
            raise protocol_error("PRIORITY on stream 0")
        self._count_control(now)
        if len(payload) != 5:
            self._stream_error(now, stream_id, ErrorCode.FRAME_SIZE_ERROR, both=False)
        elif frames.NUMBER.unpack_from(payload)[0] & frames.STREAM_MAX == stream_id:
            self._stream_error(now, stream_id, ErrorCode.PROTOCOL_ERROR, both=False)

    def _rst_stream(self, now: float, flags: int, stream_id: int, payload: memoryview) -> None:
        if len(payload) != 4:
            raise size_error("RST_STREAM")
        stream = self._streams.get(stream_id)
        if stream is not None:
            self._forget(stream, both=True)
            stream.cancel(now)
            self._count_reset(now, stream)
        elif not self._ignored(stream_id):
            self._check_not_idle(stream_id, "RST_STREAM")
            self._count_late(now)

    def _window_update(self, now: float, flags: int, stream_id: int, payload: memoryview) -> None:
        if len(payload) != 4:
            raise size_error("WINDOW_UPDATE")
        increment = frames.NUMBER.unpack(payload)[0] & frames.WINDOW_MAX
        if increment < self.limits.small_update_bytes:
            self._count_control(now)
        output = self._output
        if not stream_id:
            if not increment:
                raise protocol_error("WINDOW_UPDATE of 0")
            output.window += increment
            if output.window > frames.WINDOW_MAX:
                raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "window above the maximum")
            return
        stream = self._streams.get(stream_id)
        if stream is None:
            if not self._ignored(stream_id):
                self._check_not_idle(stream_id, "WINDOW_UPDATE")
                self._count_late(now)
        elif not increment:
            self._stream_error(now, stream_id, ErrorCode.PROTOCOL_ERROR, both=stream.peer_ended)
        else:
            stream.send_window += increment
            if stream.send_window + output.initial_window > frames.WINDOW_MAX:
                self._stream_error(now, stream_id, ErrorCode.FLOW_CONTROL_ERROR, both=stream.peer_ended)
            else:
                output.stream_window_opened(stream)

    # Frames of the connection.

    def _settings(self, now: float, flags: int, stream_id: int, payload: memoryview) -> None:
        if stream_id:
            raise protocol_error("SETTINGS on a stream")
        if len(payload) % frames.SETTING.size or (flags & frames.ACK and payload):
            raise size_error("SETTINGS")
        self._count_control(now)
        if flags & frames.ACK:
            if not self._settled:
                raise protocol_error("the first frame is not SETTINGS")
            return
        if len(payload) // frames.SETTING.size > self.limits.settings_entries:
            raise above_limit("settings")
        self._settled = True
        for name, value in frames.SETTING.iter_unpack(payload):
            if name == frames.INITIAL_WINDOW_SIZE:
                if value > frames.WINDOW_MAX:
                    raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "SETTINGS_INITIAL_WINDOW_SIZE")
                self._output.set_initial_window(value)
            elif name == frames.MAX_FRAME_SIZE:
                # Our frames stay at the least maximum.
                if not FRAME_BYTES <= value < 2**24:
                    raise protocol_error("SETTINGS_MAX_FRAME_SIZE")
            elif name == frames.ENABLE_PUSH and value > 1:
                raise protocol_error("SETTINGS_ENABLE_PUSH")
        # Messages that a new window releases are cut when the output is taken, behind this frame.
        self._output.frames.append(frames.SETTINGS_ACK)

    def _push_promise(self, now: float, flags: int, stream_id: int, payload: memoryview) -> None:
        raise protocol_error("PUSH_PROMISE from a client")

    def _ping(self, now: float, flags: int, stream_id: int, payload: memoryview) -> None:
        if stream_id:
            raise protocol_error("PING on a stream")
        if len(payload) != 8:
            raise size_error("PING")
        self._count_control(now)
        if not flags & frames.ACK:
            self._output.write_urgent(frames.ping_ack(bytes(payload)))
        elif bytes(payload) == _DRAIN_PING and self._drain_s is not None:
            self._accept_no_more(now)

    def _goaway(self, now: float, flags: int, stream_id: int, payload: memoryview) -> None:
        if stream_id:
            raise protocol_error("GOAWAY on a stream")
        if len(payload) < 8:
            raise size_error("GOAWAY")
        self._count_control(now)
        self._ending = True
        self._close_if_idle()

    # Ends of streams and of the connection.

    def _accept_no_more(self, now: float) -> None:
        """Announce the last stream of a drain."""
        self._drain_s = None
        self._final = self._ending = True
        self._output.frames.append(frames.goaway(self._last_id, ErrorCode.NO_ERROR, b"drain"))
        self._close_if_idle()

    def _close_if_idle(self) -> None:
        if self._ending and not self._streams:
            self._closing = True

    def _ignored(self, stream_id: int) -> bool:
        """Return whether a frame belongs to a stream that the client opened after the final GOAWAY."""
        return self._final and stream_id > self._last_id

    def _check_not_idle(self, stream_id: int, kind: str) -> None:
        if stream_id > self._last_id or not stream_id & 1:
            raise protocol_error(f"{kind} on an idle stream")

    def _count_received(self, size: int) -> None:
        """Count payloads of DATA on the connection's window, and return the credit at half of it."""
        window = self.limits.connection_window_bytes
        self._recv_window -= size
        if self._recv_window < 0:
            raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "DATA above the connection's window")
        if self._recv_window < window // 2:
            self._output.frames.append(frames.window_update(0, window - self._recv_window))
            self._recv_window = window

    def _count_control(self, now: float) -> None:
        if not self.control.take(now):
            raise above_limit("control_frames")

    def _count_late(self, now: float) -> None:
        self._counters.late_frames += 1
        self._count_control(now)

    def _count_reset(self, now: float, stream: Stream | None) -> None:
        """Count a reset, unless its call is so old that many clients may leave together."""
        old = stream is not None and now >= stream.began_s + self.limits.reset_age_s
        if not old and not self._resets.take(now):
            raise above_limit("resets")

    def _stream_error(self, now: float, stream_id: int, code: ErrorCode, *, both: bool) -> None:
        self._counters.stream_errors += 1
        self._reset(now, stream_id, code, both=both)

    def _reset(self, now: float, stream_id: int, code: ErrorCode, *, both: bool) -> None:
        """End a stream with RST_STREAM, also one without a call. ``both``: the client has ended its side."""
        self._output.frames.append(frames.rst_stream(stream_id, code))
        stream = self._streams.get(stream_id)
        if stream is not None:
            self._forget(stream, both=both)
            stream.cancel(now)
        elif stream_id == self._last_id:
            self._ended.add(stream_id, both)
        self._count_reset(now, stream)

    def _end_overflowed(self, now: float) -> None:
        overflowed, self._overflowed = self._overflowed, []
        try:
            for stream in overflowed:
                if stream.id in self._streams:
                    self._counters.overflows += 1
                    self._reset(now, stream.id, ErrorCode.ENHANCE_YOUR_CALM, both=stream.peer_ended)
        except ConnectionFault as fault:
            self._shut(now, fault.code, fault.text, fault.reason)

    def _end_expired(self, now: float) -> None:
        for stream_id in [stream_id for stream_id, expiry_s in self._timeouts.items() if expiry_s <= now]:
            self._timeouts.pop(stream_id, None)
            stream = self._streams.get(stream_id)
            if stream is not None:
                stream.abort(now, Status.DEADLINE_EXCEEDED, "deadline exceeded")
        self._timeouts_s = max(now + _TIMEOUTS_S, min(self._timeouts.values(), default=math.inf))

    def _forget(self, stream: Stream, *, both: bool) -> None:
        """The stream has ended."""
        del self._streams[stream.id]
        self._ended.add(stream.id, both)
        if self._timeouts:
            self._timeouts.pop(stream.id, None)
        if self._ending:
            self._close_if_idle()

    def _shut(self, now: float, code: ErrorCode, text: str, reason: str) -> None:
        """End the connection and all calls."""
        self._counters.goaways[reason] += 1
        self._output.frames.append(frames.goaway(self._last_id, code, text.encode()))
        self._cancel_all(now)

    def _cancel_all(self, now: float) -> None:
        self._closing = True
        self._overflowed.clear()
        self._timeouts.clear()
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.cancel(now)


# By the type of the frame. The connection reads DATA without this table.
_HANDLERS: Final = (
    Http2Connection._data,
    Http2Connection._headers,
    Http2Connection._priority,
    Http2Connection._rst_stream,
    Http2Connection._settings,
    Http2Connection._push_promise,
    Http2Connection._ping,
    Http2Connection._goaway,
    Http2Connection._window_update,
    Http2Connection._continuation,
)
