"""Tests of the ZMTP connection: against libzmq, and against peers that break the protocol or its bounds."""

import asyncio
import random
import tracemalloc
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

import pytest
import zmq.asyncio
from hypothesis import given
from hypothesis import strategies as st

from dualmap_extproc.engines.zmtp import COMMAND_BYTES_MAX, FRAMES_MAX, ProtocolError, ZmtpConnection
from dualmap_extproc.engines.zmtp_socket import RECEIVE_BYTES, ZmtpSocket
from ports import reserved_port
from waiting import WAIT_S

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x05READY\x0bSocket-Type\0\0\0\x03PUB"
LIMIT = 1000


def frame(content: bytes, flags: int = 0) -> bytes:
    if len(content) < 256:
        return bytes((flags, len(content))) + content
    return bytes((flags | 2,)) + len(content).to_bytes(8, "big") + content


def message(*frames: bytes) -> bytes:
    return b"".join(frame(each, number < len(frames) - 1) for number, each in enumerate(frames))


def connection(*, peer: bytes = GREETING + frame(READY, 4)) -> ZmtpConnection:
    made = ZmtpConnection(b"SUB", (b"\x01topic",), message_bytes=LIMIT)
    made.receive(peer)
    return made


def received(made: ZmtpConnection) -> list[Sequence[bytes]]:
    """Return all messages that the connection has."""
    messages = []
    while (frames := made.next_message()) is not None:
        if frames:
            messages.append(frames)
    return messages


def test_connection_greets_answers_and_subscribes():
    made = ZmtpConnection(b"SUB", (b"\x01topic",), message_bytes=LIMIT)
    assert made.take_output() == b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
    made.receive(GREETING)
    assert made.next_message() is None
    assert made.take_output() == b"\x04\x26\x05READY\x0bSocket-Type\0\0\0\x03SUB\x08Identity\0\0\0\0"
    assert not made.is_open
    made.receive(frame(READY, 4))
    assert received(made) == []
    assert made.is_open
    assert made.take_output() == b"\x00\x06\x01topic"


@given(
    st.lists(st.lists(st.binary(max_size=300), min_size=1, max_size=3), max_size=6),
    st.lists(st.integers(1, 80), min_size=1),
)
def test_messages_are_equal_in_parts_of_any_size(messages: list[list[bytes]], sizes: list[int]):
    made = connection(peer=b"")
    data = GREETING + frame(READY, 4) + b"".join(message(*each) for each in messages)
    found = []
    at = number = 0
    while at < len(data):
        size = sizes[number % len(sizes)]
        made.receive(data[at : at + size])
        found += received(made)
        at, number = at + size, number + 1
    assert [list(each) for each in found] == messages
    assert made.waiting_bytes == 0


@given(st.binary(max_size=400), st.booleans())
def test_any_bytes_are_messages_or_an_error(data: bytes, is_open: bool):
    made = connection() if is_open else connection(peer=b"")
    made.receive(data)
    with suppress(ProtocolError):
        received(made)
    assert made.waiting_bytes <= LIMIT + 400


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (frame(bytes(LIMIT + 1)), f"more than {LIMIT} bytes"),
        (b"\x02" + b"\xff" * 8, f"more than {LIMIT} bytes"),
        (frame(bytes(LIMIT // 2), 1) * 3, f"more than {LIMIT} bytes"),
        (frame(b"", 1) * (FRAMES_MAX + 1), f"more than {FRAMES_MAX} frames"),
        (frame(bytes(COMMAND_BYTES_MAX + 1), 4), f"more than {COMMAND_BYTES_MAX} bytes"),
        (frame(b"", 8), "unknown flags"),
        (frame(b"", 5), "unknown flags"),
    ],
)
def test_message_beyond_a_bound_is_an_error(sent: bytes, reason: str):
    made = connection()
    assert received(made) == []
    made.receive(sent)
    with pytest.raises(ProtocolError, match=reason):
        received(made)


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"HTTP/1.1 400", "does not use ZMTP"),
        (b"\xff" + bytes(9), "does not use ZMTP"),
        (GREETING[:10] + b"\x01", "before 3.0"),
        (GREETING[:12] + b"CURVE".ljust(20, b"\0") + bytes(32), "requires authentication"),
        (GREETING + frame(b"\x05ERROR\x03bad", 4), "refuses"),
        (GREETING + frame(b"", 4), "refuses"),
        (GREETING + frame(b"early"), "before the end of the handshake"),
    ],
)
def test_peer_without_a_handshake_is_an_error(sent: bytes, reason: str):
    made = connection(peer=sent)
    with pytest.raises(ProtocolError, match=reason):
        received(made)


def test_ping_is_answered_also_between_frames():
    made = connection()
    made.receive(frame(b"a", 1) + frame(b"\x04PING\x00\x10context", 4) + frame(b"\x07UNKNOWN", 4) + frame(b"b"))
    assert received(made) == [[b"a", b"b"]]
    assert made.take_output().endswith(frame(b"\x04PONGcontext", 4))


@asynccontextmanager
async def peer_of(kind: int, mine: bytes, *first: bytes) -> AsyncIterator[tuple[zmq.asyncio.Socket, ZmtpSocket]]:
    """Yield a socket of libzmq, and the router's socket that connects to it."""
    context = zmq.asyncio.Context()
    peer = context.socket(kind)
    port = peer.bind_to_random_port("tcp://127.0.0.1")
    ready = asyncio.Event()
    sent = ZmtpConnection(mine, first, message_bytes=4_000_000)
    socket = ZmtpSocket("127.0.0.1", port, sent, asyncio.get_running_loop(), ready.set)
    try:
        yield peer, socket
    finally:
        socket.close()
        context.destroy(linger=0)


async def next_of(socket: ZmtpSocket) -> Sequence[bytes]:
    """Wait for a message."""
    async with asyncio.timeout(WAIT_S):
        while not (frames := socket.receive()):
            if frames is None:
                readable = asyncio.Event()
                socket._on_ready = readable.set
                socket.watch()
                await readable.wait()
    return frames


async def test_publisher_of_libzmq_is_received():
    async with peer_of(zmq.XPUB, b"SUB", b"\x01kv") as (peer, socket):
        receiving = asyncio.create_task(next_of(socket))
        assert await peer.recv() == b"\x01kv"
        payload = random.Random(1).randbytes(3_000_000)
        await peer.send_multipart([b"other", b"x"])
        await peer.send_multipart([b"kv@m", bytes(8), payload])
        await peer.send_multipart([b"kv", b"", b"end"])
        assert await receiving == [b"kv@m", bytes(8), payload]
        assert await next_of(socket) == [b"kv", b"", b"end"]
        assert socket.waiting_bytes == 0


async def test_router_of_libzmq_answers():
    async with peer_of(zmq.ROUTER, b"DEALER", b"", bytes(8)) as (peer, socket):
        receiving = asyncio.create_task(next_of(socket))
        identity, *request = await peer.recv_multipart()
        assert request == [b"", bytes(8)]
        await peer.send_multipart([identity, b"", b"topic", bytes(8), b"payload"])
        assert await receiving == [b"", b"topic", bytes(8), b"payload"]


async def test_publisher_that_checks_its_connections_is_answered():
    context = zmq.asyncio.Context()
    peer = context.socket(zmq.XPUB)
    peer.set(zmq.HEARTBEAT_IVL, 100)
    # The event loop of a busy machine may answer late.
    peer.set(zmq.HEARTBEAT_TIMEOUT, 1000)
    port = peer.bind_to_random_port("tcp://127.0.0.1")
    made = ZmtpConnection(b"SUB", (b"\x01",), message_bytes=LIMIT)
    socket = ZmtpSocket("127.0.0.1", port, made, asyncio.get_running_loop(), lambda: None)
    receiving = asyncio.create_task(next_of(socket))
    try:
        assert await peer.recv() == b"\x01"
        await asyncio.sleep(1.5)
        await peer.send(b"still open")
        assert await receiving == [b"still open"]
    finally:
        receiving.cancel()
        socket.close()
        context.destroy(linger=0)


async def test_closed_port_is_an_error():
    made = ZmtpConnection(b"SUB", (b"\x01",), message_bytes=LIMIT)
    socket = ZmtpSocket("127.0.0.1", reserved_port(), made, asyncio.get_running_loop(), lambda: None)
    with pytest.raises(ConnectionRefusedError):
        await next_of(socket)
    socket.close()


async def test_endless_message_takes_bounded_memory():
    async def flood(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(GREETING + frame(READY, 4))
        with suppress(ConnectionError):
            while True:
                writer.write(frame(bytes(100_000), 1))
                await writer.drain()

    async with await asyncio.start_server(flood, "127.0.0.1", 0) as server:
        made = ZmtpConnection(b"SUB", (b"\x01",), message_bytes=4_000_000)
        port = server.sockets[0].getsockname()[1]
        socket = ZmtpSocket("127.0.0.1", port, made, asyncio.get_running_loop(), lambda: None)
        tracemalloc.start()
        with pytest.raises(ProtocolError, match="more than"):
            await next_of(socket)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        socket.close()
        await asyncio.sleep(0.1)
        assert made.waiting_bytes <= 4_000_000 + RECEIVE_BYTES
        assert peak < 10_000_000
