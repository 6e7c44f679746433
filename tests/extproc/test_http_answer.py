"""Tests of the reader of engines' HTTP answers: valid answers, hostile answers, and connections that end."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualmap.pools.pool import Member
from dualmap_extproc.engines import client
from dualmap_extproc.engines.client import EngineClient, EngineConnection, Kind
from dualmap_extproc.engines.http_answer import CHUNKS_MAX, HEAD_MAX_BYTES, Answer, AnswerError, read_answer

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
MOST = 1000
INVALID = (AnswerError, ValueError, asyncio.LimitOverrunError, asyncio.IncompleteReadError)

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def read(said: bytes, *, most: int = MOST, ends: bool = True) -> Answer:
    reader = asyncio.StreamReader(limit=HEAD_MAX_BYTES)
    reader.feed_data(said)
    if ends:
        reader.feed_eof()
    return await read_answer(reader, "/x", most=most)


class TestAnswer:
    @pytest.mark.parametrize(
        "said",
        [
            OK + b"Content-Length: 5\r\n\r\nhello",
            b"HTTP/1.1 200\r\ncontent-length:5\r\n\r\nhello",
            OK + b"CONTENT-LENGTH:  5 \r\nX: Content-Length: 9\r\n\r\nhello",
            OK + b"Content-Length: 5\r\nContent-Encoding: identity\r\nConnection: keep-alive\r\n\r\nhello",
            CHUNKED + b"5\r\nhello\r\n0\r\n\r\n",
            CHUNKED + b"2;a=b\r\nhe\r\n003 \r\nllo\r\n0\r\n\r\n",
        ],
    )
    async def test_answer_with_a_length_keeps_the_connection(self, said: bytes) -> None:
        assert await read(said, ends=False) == Answer(b"hello", keeps_open=True)

    @pytest.mark.parametrize(
        "said",
        [
            OK + b"\r\nhello",
            b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nhello",
            OK + b"Connection: Close\r\nContent-Length: 5\r\n\r\nhello",
            CHUNKED + b"5\r\nhello\r\n0\r\nTrailer: x\r\n\r\n",
        ],
    )
    async def test_other_answer_ends_the_connection(self, said: bytes) -> None:
        assert await read(said) == Answer(b"hello", keeps_open=False)

    async def test_empty_answer_is_read(self) -> None:
        assert (await read(OK + b"Content-Length: 0\r\n\r\n", ends=False)).content == b""
        assert (await read(CHUNKED + b"0\r\n\r\n", ends=False)).content == b""
        assert (await read(OK + b"\r\n")).content == b""

    @pytest.mark.parametrize(
        "said",
        [
            b"",
            b"junk\r\n\r\n",
            b"HTTP/2 200\r\n\r\n",
            b"HTTP/1.1 20 OK\r\n\r\n",
            b"HTTP/1.1 2000\r\n\r\n",
            OK,
            OK + b"Content-Length: 5\r\n\r\nhell",
            OK + b"Content-Length: -5\r\n\r\nhello",
            OK + b"Content-Length: 5x\r\n\r\nhello",
            OK + b"Content-Length: \r\n\r\nhello",
            OK + b"Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello",
            OK + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
            OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
            OK + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            CHUNKED,
            CHUNKED + b"junk",
            CHUNKED + b"junk\r\n",
            CHUNKED + b"-5\r\nhello\r\n0\r\n\r\n",
            CHUNKED + b"0x5\r\nhello\r\n0\r\n\r\n",
            CHUNKED + b"5\r\nhel",
            CHUNKED + b"5\r\nhello",
            CHUNKED + b"4\r\nhello\r\n0\r\n\r\n",
            CHUNKED + b"5\r\nhello\r\n",
            CHUNKED + b"5\r\nhello\r\n0\r\n",
            CHUNKED + b"5" + b";" * HEAD_MAX_BYTES * 2,
        ],
    )
    async def test_answer_that_is_not_http_is_refused(self, said: bytes) -> None:
        with pytest.raises(INVALID) as refusal:
            await read(said)
        assert not isinstance(refusal.value, AnswerError)

    @pytest.mark.parametrize("status", [100, 103, 204, 301, 404, 500])
    async def test_answer_with_another_status_is_refused(self, status: int) -> None:
        with pytest.raises(AnswerError, match=f"^/x was answered with {status}$"):
            await read(b"HTTP/1.1 %d X\r\n\r\n" % status)

    @pytest.mark.parametrize("coding", [b"gzip", b"GZIP", b"identity, gzip", b"br\r\nContent-Encoding: identity"])
    async def test_compressed_answer_is_refused(self, coding: bytes) -> None:
        with pytest.raises(AnswerError, match=r"^/x is compressed$"):
            await read(OK + b"Content-Encoding: " + coding + b"\r\n\r\n")

    @pytest.mark.parametrize(
        ("framing", "ends"),
        [
            (b"Content-Length: %d\r\n\r\n", b""),
            (b"Transfer-Encoding: chunked\r\n\r\n%x\r\n", b"\r\n0\r\n\r\n"),
        ],
    )
    async def test_largest_answer_is_read_and_a_larger_one_refused(self, framing: bytes, ends: bytes) -> None:
        content = b"x" * MOST
        assert (await read(OK + framing % MOST + content + ends)).content == content
        # The answer is refused before its content arrives.
        with pytest.raises(AnswerError, match=r"^/x has more than 1000 bytes$"):
            await read(OK + framing % (MOST + 1), ends=False)

    async def test_answer_without_a_length_is_bounded(self) -> None:
        assert (await read(OK + b"\r\n" + b"x" * MOST)).content == b"x" * MOST
        with pytest.raises(AnswerError, match=r"^/x has more than 1000 bytes$"):
            await read(OK + b"\r\n" + b"x" * (MOST + 1), ends=False)

    @pytest.mark.parametrize("length", [b"9" * 15, b"9" * 16, b"9" * 5000])
    async def test_huge_length_is_refused_at_once(self, length: bytes) -> None:
        with pytest.raises(INVALID):
            await read(OK + b"Content-Length: " + length + b"\r\n\r\n", ends=False)

    async def test_huge_chunk_is_refused_at_once(self) -> None:
        with pytest.raises(AnswerError, match=r"^/x has more than 1000 bytes$"):
            await read(CHUNKED + b"ffffffffffff\r\n", ends=False)
        with pytest.raises(ValueError, match="chunk"):
            await read(CHUNKED + b"f" * 5000 + b"\r\n", ends=False)

    async def test_chunks_are_bounded(self) -> None:
        most = b"1\r\nx\r\n" * CHUNKS_MAX
        assert (await read(CHUNKED + most + b"0\r\n\r\n", most=10**6)).content == b"x" * CHUNKS_MAX
        with pytest.raises(AnswerError, match=r"^/x has more than 1024 chunks$"):
            await read(CHUNKED + most + b"1\r\nx\r\n", most=10**6, ends=False)

    async def test_endless_head_is_refused(self) -> None:
        with pytest.raises(asyncio.LimitOverrunError):
            await read(OK + b"X: y\r\n" * HEAD_MAX_BYTES, ends=False)

    @pytest.mark.parametrize("line", [b"X: y\r\n", b"Connection: close\r\n", b"\n", b"\r", b"content-length", b": "])
    async def test_hostile_head_takes_little_time(self, line: bytes) -> None:
        said = OK + line * ((HEAD_MAX_BYTES - 100) // len(line)) + b"\r\n\r\n"
        begun_s = time.process_time()
        assert (await read(said)).keeps_open is False
        assert time.process_time() - begun_s < 0.05

    @given(st.binary(max_size=200), st.sampled_from([b"", OK, OK + b"\r\n", CHUNKED, OK + b"Content-Length: "]))
    async def test_any_bytes_give_an_answer_or_a_known_error(self, said: bytes, begin: bytes) -> None:
        try:
            answer = await read(begin + said)
        except INVALID:
            return
        assert len(answer.content) <= MOST


class Engine:
    """A server that talks as the test wants; counts its connections and requests."""

    def __init__(self, *talks: Talk) -> None:
        self._talks = talks
        self.connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        talk = self._talks[min(self.connections, len(self._talks) - 1)]
        self.connections += 1
        try:
            await talk(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def connected(engine: Engine) -> AsyncIterator[EngineConnection]:
    server = await asyncio.start_server(engine.serve, "127.0.0.1", 0)
    member = Member(id="m", address="127.0.0.1", port=server.sockets[0].getsockname()[1])
    connection = EngineClient().connect(member)
    try:
        yield connection
    finally:
        connection.close()
        server.close()


def saying(answer: bytes, *, times: int) -> Talk:
    """Answer so many requests on a connection, and then close the connection."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(times):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            await writer.drain()

    return talk


async def closing(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")


async def endless_head(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(OK)
    while True:
        writer.write(b"X: y\r\n" * 1000)
        await writer.drain()


async def slow_head(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    for byte in OK + b"X: y\r\n" * 1000:
        writer.write(bytes([byte]))
        await writer.drain()
        await asyncio.sleep(0.01)


HELLO = OK + b"Content-Length: 5\r\n\r\nhello"


class TestConnection:
    @pytest.fixture(autouse=True)
    def soon(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(client, "TIMEOUT_S", 0.5)

    async def test_connection_stays_open_between_requests(self) -> None:
        engine = Engine(saying(HELLO, times=3))
        async with connected(engine) as connection:
            assert [await connection.page("/x", Kind.LOAD) for _ in range(3)] == [b"hello"] * 3
        assert engine.connections == 1

    @pytest.mark.parametrize("pause_s", [0.0, 0.1])
    async def test_connection_that_the_engine_closed_is_opened_again(self, pause_s: float) -> None:
        engine = Engine(saying(HELLO, times=1))
        async with connected(engine) as connection:
            for _ in range(3):
                assert await connection.page("/x", Kind.LOAD) == b"hello"
                await asyncio.sleep(pause_s)
        assert engine.connections == 3

    async def test_answer_that_ends_the_connection_is_not_followed_by_another(self) -> None:
        async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(OK + b"Connection: close\r\nContent-Length: 5\r\n\r\nhello")
            await reader.read()

        engine = Engine(talk)
        async with connected(engine) as connection:
            for _ in range(2):
                assert await connection.page("/x", Kind.LOAD) == b"hello"
        assert engine.connections == 2

    async def test_early_close_is_an_answer_that_is_not_http(self) -> None:
        engine = Engine(closing)
        async with connected(engine) as connection:
            with pytest.raises(AnswerError, match=r"^/x: no valid HTTP answer \(it ends early\)$") as refusal:
                await connection.page("/x", Kind.LOAD)
        assert not refusal.value.silent
        assert engine.connections == 1

    async def test_refused_connection_is_silent_and_shows_no_address(self) -> None:
        connection = EngineClient().connect(Member(id="m", address="127.0.0.1", port=1))
        with pytest.raises(AnswerError, match=r"^/x: no connection \(Connection refused\)$") as refusal:
            await connection.page("/x", Kind.LOAD)
        assert refusal.value.silent

    async def test_early_close_of_an_open_connection_is_tried_once_more(self) -> None:
        engine = Engine(saying(HELLO, times=1), closing)
        async with connected(engine) as connection:
            assert await connection.page("/x", Kind.LOAD) == b"hello"
            with pytest.raises(AnswerError, match=r"^/x: no valid HTTP answer"):
                await connection.page("/x", Kind.LOAD)
        assert engine.connections == 2

    async def test_endless_head_is_refused(self) -> None:
        async with connected(Engine(endless_head)) as connection:
            with pytest.raises(AnswerError, match=r"^/x: no valid HTTP answer \(a line or the head is too long\)$"):
                await connection.page("/x", Kind.LOAD)

    async def test_slow_head_is_refused_in_time(self) -> None:
        async with connected(Engine(slow_head)) as connection:
            with pytest.raises(AnswerError, match=r"^/x was not answered within 0.5 s$") as refusal:
                await connection.page("/x", Kind.LOAD)
        assert refusal.value.silent

    async def test_connection_after_a_refused_answer_is_new(self) -> None:
        engine = Engine(saying(OK + b"Content-Length: 9\r\nContent-Encoding: gzip\r\n\r\n" + HELLO, times=1),
                        saying(HELLO, times=1))  # fmt: skip
        async with connected(engine) as connection:
            with pytest.raises(AnswerError, match=r"^/x is compressed$"):
                await connection.page("/x", Kind.LOAD)
            assert await connection.page("/x", Kind.LOAD) == b"hello"
        assert engine.connections == 2

    async def test_cancelled_request_closes_the_connection(self) -> None:
        arrived, ended = asyncio.Event(), asyncio.Event()

        async def talk(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            arrived.set()
            await reader.read()
            ended.set()

        async with connected(Engine(talk)) as connection:
            asking = asyncio.create_task(connection.page("/x", Kind.LOAD))
            await arrived.wait()
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            await ended.wait()

    async def test_zone_of_an_address_is_not_sent(self) -> None:
        member = Member(id="m", address="fe80::1%eth0\r\nX: y", port=80)
        assert "Host: [fe80::1]:80\r\n" in EngineClient().connect(member)._fields
        assert "X: y" not in EngineClient().connect(member)._fields
