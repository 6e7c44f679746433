"""One connection to another router, after the handshake: frames in both directions, heartbeats and a bounded outbox.

``send`` appends to the outbox. The outbox is written once in an iteration of the event loop; while a write is in
progress, further frames gather for the next write. A connection whose outbox is full, or that is silent, ends.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol

import grpc

from dualmap_extproc.peers.codec import Frame, UnreadableFrame, decode_frame

HEARTBEAT_S: Final = 0.25
"""The interval of heartbeats."""
SILENT_BEATS: Final = 4
"""A router is lost after this many intervals without a frame from it. The router's own pauses do not count."""
OUTBOX_BYTES_MAX: Final = 16 * 2**20
"""The most bytes that wait to be written."""
# A write joins frames up to this size, so that the receiver does not decode for milliseconds without a pause.
_WRITE_BYTES: Final = 64 * 1024
# A frame without content is empty in protobuf's encoding.
HEARTBEAT: Final = b""


class Stream(Protocol):
    """The methods of both sides of a gRPC stream that a link uses."""

    async def read(self) -> object:
        """Return the next frame, or ``grpc.aio.EOF``."""

    async def write(self, message: bytes, /) -> None:
        """Write a frame; wait while the other side does not read."""


class Link:
    """A connection to the router ``peer``. ``run`` serves it until it ends."""

    def __init__(self, peer: str, stream: Stream, *, outbox_bytes_max: int = OUTBOX_BYTES_MAX) -> None:
        self.peer = peer
        self._stream = stream
        self._outbox: deque[bytes] = deque()
        self._outbox_bytes = 0
        self._outbox_bytes_max = outbox_bytes_max
        self._filled = asyncio.Event()
        self._heard = True
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def send(self, frame: bytes) -> None:
        """Write a frame soon; end the connection if the outbox is full."""
        self._outbox_bytes += len(frame)
        if self._outbox_bytes > self._outbox_bytes_max:
            self.end("it does not read what this router sends")
            return
        self._outbox.append(frame)
        self._filled.set()

    def end(self, reason: str) -> None:
        """End the connection, without the frames in the outbox."""
        if not self._ended.done():
            self._ended.set_result(reason)

    async def run(self, on_frame: Callable[[Frame], Awaitable[None]]) -> str:
        """Serve the connection until it ends; return the reason. ``on_frame`` receives each frame."""
        tasks = [asyncio.create_task(each) for each in (self._read(on_frame), self._write(), self._beat())]
        ended: list[asyncio.Future[Any]] = [*tasks, self._ended]
        try:
            await asyncio.wait(ended, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.end("it was closed")
            failed = [task for task in tasks if task.done()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in failed:
            task.result()
        return self._ended.result()

    async def _read(self, on_frame: Callable[[Frame], Awaitable[None]]) -> None:
        while (data := await self._read_data()) is not None:
            self._heard = True
            try:
                frame = decode_frame(data)
            except UnreadableFrame as error:
                self.end(f"it sent an unreadable frame: {error}")
                return
            # Another router must not be able to end this one. The error's text may quote a request.
            except Exception as error:  # noqa: BLE001
                self.end(f"it sent an unreadable frame: {type(error).__name__}")
                return
            await on_frame(frame)

    async def _read_data(self) -> bytes | None:
        """Return the next frame; None after the end of the stream."""
        try:
            data = await self._stream.read()
        # gRPC raises errors of several classes for a stream that has ended.
        except Exception as error:  # noqa: BLE001
            self.end(reason_of(error))
            return None
        if isinstance(data, bytes):
            return data
        self.end("it closed the connection")
        return None

    async def _write(self) -> None:
        while True:
            await self._filled.wait()
            frames = [self._outbox.popleft()]
            size = len(frames[0])
            while self._outbox and size + len(self._outbox[0]) <= _WRITE_BYTES:
                frames.append(self._outbox.popleft())
                size += len(frames[-1])
            if not self._outbox:
                self._filled.clear()
            try:
                await self._stream.write(b"".join(frames))
            # The same holds for writes.
            except Exception as error:  # noqa: BLE001
                self.end(reason_of(error))
                return
            self._outbox_bytes -= size

    async def _beat(self) -> None:
        """Send heartbeats, and end a silent connection.

        The number of the router's own heartbeats is its clock: after a pause of this router, frames of the other
        router wait to be read.
        """
        silent = 0
        while silent < SILENT_BEATS:
            self._heard = False
            if not self._outbox:
                self.send(HEARTBEAT)
            await asyncio.sleep(HEARTBEAT_S)
            silent = 0 if self._heard else silent + 1
        self.end(f"it was silent for {SILENT_BEATS * HEARTBEAT_S:g} s")


def reason_of(error: Exception) -> str:
    """Return why a gRPC stream has ended."""
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name.lower()}: {error.details()}"
    if isinstance(error, TimeoutError):
        return "it does not answer"
    return str(error) or type(error).__name__
