"""What goes to the peer: frames, the send windows, and the messages that wait for them; and rates of frames."""

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Final, Protocol

from dualmap_extproc.transport.http2 import frames
from dualmap_extproc.transport.http2.hpack import TABLE_SIZE_ZERO


class Bucket:
    """A token bucket: ``burst`` at once, and ``rate`` per second. Others may return tokens by adding to ``left``."""

    __slots__ = ("_at", "_burst", "_rate", "left")

    def __init__(self, burst: int, rate: int, now: float) -> None:
        self._burst = float(burst)
        self._rate = rate
        self._at = now
        self.left = self._burst

    def take(self, now: float) -> bool:
        """Take a token; return False if there is none."""
        left = min(self._burst, self.left + max(0.0, now - self._at) * self._rate)
        self._at = now
        self.left = left - 1 if left >= 1 else left
        return left >= 1


class Sending(Protocol):
    """The part of a stream that ``Output`` uses: messages that wait for the peer's windows."""

    id: int
    send_window: int
    queue: deque[memoryview]
    unsent_bytes: int

    def queue_empty(self) -> None:
        """All waiting messages are in the output."""


class Output:
    """The bytes for the peer, and the streams whose messages wait.

    A stream's ``send_window`` counts from the peer's initial window, ``initial_window``, so that a new SETTINGS frame
    changes all windows at once (RFC 9113 section 6.9.2). ``window`` is the connection's window. ``room`` is the number
    of message bytes that the present piece of output may still have.

    Messages that fit into the windows go to ``frames`` directly (``Stream.send``). Others wait in their streams and are
    cut when the adapter takes the output, one frame of each stream in turn.
    """

    __slots__ = (
        "_on_output",
        "_output_bytes",
        "_ready",
        "_stalled",
        "_urgent",
        "frames",
        "fresh",
        "initial_window",
        "quiet",
        "room",
        "unsent_bytes",
        "window",
    )

    def __init__(self, output_bytes: int, on_output: Callable[[], None]) -> None:
        self._output_bytes: Final = output_bytes
        self._on_output: Final = on_output
        self._ready: OrderedDict[Sending, None] = OrderedDict()
        self._stalled: dict[Sending, None] = {}
        self._urgent: list[bytes] = []
        self.frames: Final[list[bytes | memoryview]] = []
        # Whether no header block has been sent: the first one begins with a table size update.
        self.fresh = True
        # Whether the adapter is about to take the output, so that it need not be called.
        self.quiet = True
        self.window = frames.WINDOW_INITIAL
        self.initial_window = frames.WINDOW_INITIAL
        self.room = output_bytes
        self.unsent_bytes = 0

    def signal(self) -> None:
        """Ask the adapter once to take the output."""
        if not self.quiet:
            self.quiet = True
            self._on_output()

    def write_urgent(self, frame: bytes) -> None:
        """Write a frame ahead of everything that is not taken yet."""
        self._urgent.append(frame)

    def block(self, block: bytes) -> bytes:
        """Return a header block as it must be sent now: the first of a connection empties our encoder's table."""
        if self.fresh:
            self.fresh = False
            return TABLE_SIZE_ZERO + block
        return block

    def write_end(self, stream_id: int, block: bytes, *, peer_ended: bool) -> None:
        """Write the last header block of a stream. If the peer has not ended its side, reset the stream then."""
        self.frames.append(frames.headers(stream_id, self.block(block), frames.END_STREAM))
        if not peer_ended:
            self.frames.append(frames.rst_stream(stream_id, frames.ErrorCode.NO_ERROR))

    def take(self) -> bytes:
        """Return the next piece of output; empty if nothing can be sent."""
        self.quiet = True
        if self._ready:
            self._cut()
        out = b"".join((*self._urgent, *self.frames))
        self._urgent.clear()
        self.frames.clear()
        self.room = self._output_bytes
        self.quiet = False
        return out

    def wait(self, stream: Sending) -> None:
        """Cut the stream's messages as soon as there is a window."""
        self._ready[stream] = None

    def stream_window_opened(self, stream: Sending) -> None:
        """The stream's window has grown."""
        if stream in self._stalled:
            del self._stalled[stream]
            self.wait(stream)

    def set_initial_window(self, size: int) -> None:
        """Apply the peer's SETTINGS_INITIAL_WINDOW_SIZE."""
        grown = size > self.initial_window
        self.initial_window = size
        if grown:
            stalled, self._stalled = self._stalled, {}
            for stream in stalled:
                self.wait(stream)

    def forget(self, stream: Sending) -> None:
        """Drop the messages of an ended stream."""
        self.unsent_bytes -= stream.unsent_bytes
        stream.unsent_bytes = 0
        stream.queue.clear()
        self._stalled.pop(stream, None)
        self._ready.pop(stream, None)

    def _cut(self) -> None:
        """Move waiting messages into frames, one frame of each stream in turn."""
        ready, out = self._ready, self.frames
        while ready and self.window > 0 and self.room > 0:
            stream, _ = ready.popitem(last=False)
            if not stream.unsent_bytes:
                continue
            size = min(
                frames.FRAME_BYTES,
                stream.unsent_bytes,
                stream.send_window + self.initial_window,
                self.window,
                self.room,
            )
            if size <= 0:
                self._stalled[stream] = None
                continue
            stream.send_window -= size
            stream.unsent_bytes -= size
            self.window -= size
            self.room -= size
            self.unsent_bytes -= size
            out.append(frames.HEADER.pack(size << 8 | frames.DATA, 0, stream.id))
            queue = stream.queue
            while size:
                piece = queue[0]
                if len(piece) > size:
                    out.append(piece[:size])
                    queue[0] = piece[size:]
                    break
                out.append(piece)
                queue.popleft()
                size -= len(piece)
            if stream.unsent_bytes:
                self.wait(stream)
            else:
                stream.queue_empty()
