"""Clients of Envoy's listener: HTTP/1 with or without chunks, HTTP/2 with or without trailers, raw bytes."""

import asyncio
import contextlib
import hashlib
import io
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

import aiohttp
import h2.config
import h2.connection
import h2.events
import h2.settings

REQUEST_TIMEOUT_S = 30.0


@dataclass(slots=True, kw_only=True)
class Reply:
    """A response; header names are in lower case, and ``reset`` is true if the stream broke before its end."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    trailers: dict[str, str] = field(default_factory=dict)
    reset: bool = False


def sha256(body: bytes) -> str:
    """Return the digest in the engines' format."""
    return hashlib.sha256(body).hexdigest()


async def http1(
    url: str,
    *,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
    method: str | None = None,
    chunk_bytes: int = 0,
    timeout_s: float = REQUEST_TIMEOUT_S,
) -> Reply:
    """Send one request on a new connection: POST with a body, GET without; ``chunk_bytes`` sets chunked encoding."""
    data = None if body is None else _chunks(body, chunk_bytes) if chunk_bytes else io.BytesIO(body)
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    async with (
        aiohttp.ClientSession(timeout=timeout, auto_decompress=False) as session,
        session.request(method or ("GET" if body is None else "POST"), url, data=data, headers=headers) as response,
    ):
        content = await response.read()
        return Reply(status=response.status, headers=_lower(response.headers.items()), body=content)


async def _chunks(body: bytes, size: int) -> AsyncIterator[bytes]:
    for start in range(0, len(body), size):
        yield body[start : start + size]


@contextlib.asynccontextmanager
async def opened(
    url: str, body: bytes | AsyncIterator[bytes], *, timeout_s: float = REQUEST_TIMEOUT_S
) -> AsyncIterator[aiohttp.ClientResponse]:
    """Send a POST and yield the response when its headers arrive; leaving the context early disconnects."""
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        headers = {"content-type": "application/json"}
        response = await session.post(url, data=body, headers=headers)
        try:
            yield response
        finally:
            response.close()


async def in_halves(body: bytes, second: asyncio.Event) -> AsyncIterator[bytes]:
    """Yield the first half of a body, and the second half after ``second`` is set."""
    yield body[: len(body) // 2]
    await second.wait()
    yield body[len(body) // 2 :]


async def http2(
    port: int,
    *,
    path: str,
    body: bytes = b"",
    headers: Mapping[str, str] | None = None,
    trailers: Sequence[tuple[str, str]] = (),
    host: str = "127.0.0.1",
    timeout_s: float = REQUEST_TIMEOUT_S,
) -> Reply:
    """Send one POST by HTTP/2 with prior knowledge; flow control determines the body's frames."""
    async with asyncio.timeout(timeout_s):
        reader, writer = await asyncio.open_connection(host, port)
        try:
            return await _Http2Exchange(reader, writer).post(path, body, headers or {}, trailers)
        finally:
            writer.close()


class _Http2Exchange:
    """One request on one HTTP/2 connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._connection = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        self._reply = Reply()
        self._done = False

    async def post(
        self, path: str, body: bytes, headers: Mapping[str, str], trailers: Sequence[tuple[str, str]]
    ) -> Reply:
        connection = self._connection
        connection.initiate_connection()
        connection.increment_flow_control_window(1 << 28)
        stream = connection.get_next_available_stream_id()
        pseudo = [(":method", "POST"), (":path", path), (":scheme", "http"), (":authority", "envoy")]
        connection.send_headers(stream, [*pseudo, *headers.items()])
        sent = 0
        while sent < len(body) and not self._done:
            room = min(connection.local_flow_control_window(stream), connection.max_outbound_frame_size)
            if room == 0:
                await self._receive()
                continue
            connection.send_data(stream, body[sent : sent + room])
            sent += room
            await self._flush()
        if not self._done:
            if trailers:
                connection.send_headers(stream, list(trailers), end_stream=True)
            else:
                connection.end_stream(stream)
        while not self._done:
            await self._receive()
        return self._reply

    async def _flush(self) -> None:
        self._writer.write(self._connection.data_to_send())
        await self._writer.drain()

    async def _receive(self) -> None:
        await self._flush()
        data = await self._reader.read(65536)
        if not data:
            self._done = self._reply.reset = True
            return
        for event in self._connection.receive_data(data):
            self._take(event)
        await self._flush()

    def _take(self, event: h2.events.Event) -> None:
        if isinstance(event, h2.events.ResponseReceived):
            headers = _lower((str(key), str(value)) for key, value in event.headers)
            self._reply.status = int(headers.pop(":status"))
            self._reply.headers = headers
        elif isinstance(event, h2.events.DataReceived):
            self._reply.body += event.data
            self._connection.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        elif isinstance(event, h2.events.TrailersReceived):
            self._reply.trailers = _lower((str(key), str(value)) for key, value in event.headers)
        elif isinstance(event, h2.events.StreamEnded):
            self._done = True
        elif isinstance(event, h2.events.StreamReset | h2.events.ConnectionTerminated):
            self._done = self._reply.reset = True


async def upload(
    port: int,
    path: str,
    body: bytes,
    *,
    chunk_bytes: int = 0,
    host: str = "127.0.0.1",
    timeout_s: float = REQUEST_TIMEOUT_S,
) -> Reply:
    """Send a POST by HTTP/1 and read the response at the same time: a rejection arrives before the body's end."""
    async with asyncio.timeout(timeout_s):
        reader, writer = await asyncio.open_connection(host, port)
        sending = asyncio.create_task(_upload(writer, path, body, chunk_bytes))
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = _lower(line.split(": ", 1) for line in head[1:] if line)  # type: ignore[misc]  # two parts each
            content = await reader.readexactly(int(headers.get("content-length", 0)))
            return Reply(status=int(head[0].split()[1]), headers=headers, body=content)
        finally:
            sending.cancel()
            await asyncio.wait((sending,))
            writer.close()


async def _upload(writer: asyncio.StreamWriter, path: str, body: bytes, chunk_bytes: int) -> None:
    framing = "transfer-encoding: chunked" if chunk_bytes else f"content-length: {len(body)}"
    writer.write(f"POST {path} HTTP/1.1\r\nhost: envoy\r\n{framing}\r\n\r\n".encode())
    piece_bytes = chunk_bytes or 65536
    # The server may close the connection immediately after a rejection.
    with contextlib.suppress(ConnectionError):
        for start in range(0, len(body), piece_bytes):
            piece = body[start : start + piece_bytes]
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece) if chunk_bytes else piece)
            await writer.drain()
        if chunk_bytes:
            writer.write(b"0\r\n\r\n")


async def raw(port: int, data: bytes, *, host: str = "127.0.0.1", timeout_s: float = REQUEST_TIMEOUT_S) -> bytes:
    """Send bytes unchanged and return all received bytes until the server closes the connection."""
    async with asyncio.timeout(timeout_s):
        reader, writer = await asyncio.open_connection(host, port)
        try:
            writer.write(data)
            await writer.drain()
            return await reader.read(-1)
        finally:
            writer.close()


def _lower(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    return {key.lower(): value for key, value in pairs}


class SlowReader:
    """An HTTP/2 connection with one GET, whose client accepts only the bytes that ``read`` allows."""

    def __init__(self, port: int, path: str) -> None:
        self._port = port
        self._path = path
        self._connection = h2.connection.H2Connection(h2.config.H2Configuration())
        self._stream = 1
        self.body = b""
        self.ended = False
        self.reset = False

    async def __aenter__(self) -> Self:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        connection = self._connection
        connection.local_settings = h2.settings.Settings(
            initial_values={h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 0}
        )
        connection.initiate_connection()
        pseudo = [(":method", "GET"), (":path", self._path), (":scheme", "http"), (":authority", "envoy")]
        connection.send_headers(self._stream, pseudo, end_stream=True)
        self._writer.write(connection.data_to_send())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()

    async def read(self, size: int, *, timeout_s: float) -> None:
        """Accept ``size`` more bytes, and receive for ``timeout_s`` or until the stream ends."""
        if size:
            self._connection.increment_flow_control_window(size)
            self._connection.increment_flow_control_window(size, self._stream)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not (self.ended or self.reset):
                    self._writer.write(self._connection.data_to_send())
                    data = await self._reader.read(65536)
                    for event in self._connection.receive_data(data):
                        if isinstance(event, h2.events.DataReceived):
                            self.body += event.data
                        self.ended |= isinstance(event, h2.events.StreamEnded)
                        self.reset |= isinstance(event, h2.events.StreamReset)
                    self.reset |= not data
