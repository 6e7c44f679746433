"""Tests of the HTTP client for engines: the bounds on what it reads, and on how long it waits."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from dualmap.pools.pool import Member
from dualmap_extproc.engines import client
from dualmap_extproc.engines.client import DOCUMENT_MAX_BYTES, PAGE_MAX_BYTES, EngineClient, EngineConnection, Kind
from dualmap_extproc.engines.http_answer import AnswerError
from extproc.scripted_engines import HOST, Scripted, serving, vllm


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait less than usual for an answer."""
    monkeypatch.setattr(client, "TIMEOUT_S", 0.3)


class TestClient:
    @asynccontextmanager
    async def connection(self, member: Member) -> AsyncIterator[EngineConnection]:
        connection = EngineClient().connect(member)
        try:
            yield connection
        finally:
            connection.close()

    async def refused(self, engine: Scripted, path: str = "/metrics") -> str:
        async with serving(engine) as member, self.connection(member) as each:
            with pytest.raises(AnswerError) as refusal:
                await each.page(path, Kind.LOAD)
        return str(refusal.value)

    async def test_page_above_the_limit_is_refused(self) -> None:
        largest = Scripted({"/metrics": "x" * PAGE_MAX_BYTES})
        async with serving(largest) as member, self.connection(member) as each:
            assert len(await each.page("/metrics", Kind.LOAD)) == PAGE_MAX_BYTES
        assert await self.refused(vllm(metrics="x" * (PAGE_MAX_BYTES + 1))) == "/metrics has more than 1048576 bytes"

    async def test_document_above_its_limit_is_refused(self) -> None:
        engine = vllm(version="9" * (DOCUMENT_MAX_BYTES + 1))
        async with serving(engine) as member, self.connection(member) as each:
            with pytest.raises(AnswerError, match="/version has more than 262144 bytes"):
                await each.document("/version")

    async def test_endless_page_is_refused(self) -> None:
        async def endless(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse()
            await response.prepare(request)
            while True:
                await response.write(b"\n" * 60_000)

        assert await self.refused(vllm(metrics=endless)) == "/metrics has more than 1048576 bytes"

    async def test_trickling_page_is_refused(self) -> None:
        async def trickling(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse()
            await response.prepare(request)
            while True:
                await response.write(b"\n")
                await asyncio.sleep(0.05)

        assert await self.refused(vllm(metrics=trickling)) == "/metrics was not answered within 0.3 s"

    async def test_compressed_page_is_refused(self) -> None:
        async def compressed(_request: web.Request) -> web.StreamResponse:
            return web.Response(body=b"bomb", headers={"Content-Encoding": "gzip"})

        assert await self.refused(vllm(metrics=compressed)) == "/metrics is compressed"

    async def test_redirect_is_not_followed(self) -> None:
        async with serving(vllm()) as other:

            async def elsewhere(_request: web.Request) -> web.StreamResponse:
                raise web.HTTPFound(f"http://{other.endpoint}/metrics")

            assert await self.refused(vllm(metrics=elsewhere)) == "/metrics was answered with 302"

    async def test_request_carries_no_credentials_and_keeps_no_cookies(self) -> None:
        async def answer(_request: web.Request) -> web.StreamResponse:
            response = web.Response(text="{}")
            response.set_cookie("a", "b")
            return response

        engine = vllm(version=answer)
        async with serving(engine) as member, self.connection(member) as each:
            for _ in range(2):
                assert await each.document("/version") == {}
        for head in engine.heads:
            assert set(head) == {"Host", "Accept", "Accept-Encoding", "User-Agent"}
            assert head["Accept-Encoding"] == "identity"

    @pytest.mark.parametrize("said", [b"junk\r\n\r\n", b"", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nx"])
    async def test_invalid_http_is_refused(self, said: bytes) -> None:
        async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(said)
            writer.close()

        server = await asyncio.start_server(talk, HOST, 0)
        member = Member(id="m", address=HOST, port=server.sockets[0].getsockname()[1])
        async with server, self.connection(member) as each:
            with pytest.raises(AnswerError, match="/metrics"):
                await each.page("/metrics", Kind.LOAD)

    @pytest.mark.parametrize("address", ["fe80::1%nowhere", "::1"])
    async def test_unreachable_address_is_refused(self, address: str) -> None:
        async with self.connection(Member(id="m", address=address, port=9)) as each:
            with pytest.raises(AnswerError, match="/metrics"):
                await each.page("/metrics", Kind.LOAD)

    @pytest.mark.parametrize("address", [HOST, "::1"])
    async def test_error_of_a_refused_connection_names_no_address(self, address: str) -> None:
        async with self.connection(Member(id="m", address=address, port=9)) as each:
            with pytest.raises(AnswerError) as error:
                await each.page("/metrics", Kind.LOAD)
        assert str(error.value).startswith("/metrics: no connection (")
        assert address not in str(error.value)

    @pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "9" * 5000])
    async def test_page_that_is_no_json_is_refused(self, text: str) -> None:
        async with serving(Scripted({"/version": text or " "})) as member, self.connection(member) as each:
            with pytest.raises(AnswerError, match="/version is not JSON"):
                await each.document("/version")
