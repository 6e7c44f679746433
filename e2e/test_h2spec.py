"""Tests that the HTTP/2 server passes all conformance tests of h2spec, also those that it calls strict."""

import asyncio
import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from dualmap_extproc.transport.http2 import opening
from dualmap_extproc.transport.http2.calls import Call, Factory
from dualmap_extproc.transport.http2.connection import Http2Connection
from dualmap_extproc.transport.http2.hpack import Header
from dualmap_extproc.transport.http2.limits import Http2Counters, Http2Limits
from harness.go_programs import GoProgram

H2SPEC = GoProgram(
    name="h2spec", folder=Path(__file__).parent / "h2spec", package="github.com/summerwind/h2spec/cmd/h2spec"
)
# h2spec opens as many streams as the server announces.
LIMITS = Http2Limits(streams=100)


class Answer:
    """A handler that answers with one message after the half close, so that h2spec can limit the answer's windows."""

    def __init__(self, call: Call) -> None:
        self._call = call

    def message(self, now: float, data: memoryview | bytes) -> None:
        pass

    def half_closed(self, now: float) -> None:
        self._call.send(b"an answer of some bytes")
        self._call.finish()

    def cancelled(self, now: float) -> None:
        pass

    def drained(self) -> None:
        pass


class Server(asyncio.Protocol):
    """The least adapter: one connection of a client."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._connection = Http2Connection(
            {},
            LIMITS,
            self._loop.time(),
            peer="h2spec",
            counters=Http2Counters(),
            on_output=lambda: self._loop.call_soon(self._write),
            on_failure=lambda call, error: pytest.fail(f"{call.path}: {error!r}"),
        )
        self._write()

    def data_received(self, data: bytes) -> None:
        self._connection.receive(self._loop.time(), data)
        self._write()

    def connection_lost(self, error: Exception | None) -> None:
        self._connection.lost(self._loop.time())

    def _write(self) -> None:
        while output := self._connection.take_output():
            self._transport.write(output)
        if self._connection.closing:
            self._transport.close()


@pytest.fixture(name="_any_request")
def _any_request_fixture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve requests of any path, method and content type. h2spec sends plain HTTP requests, not calls of gRPC."""
    read = opening.read

    def lenient(headers: Sequence[Header], methods: Mapping[bytes, Factory]) -> opening.Opening:
        return dataclasses.replace(read(headers, methods), factory=Answer)

    monkeypatch.setattr(opening, "read", lenient)


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("_any_request")
async def test_http2_server_passes_all_146_tests_of_h2spec() -> None:
    path = await H2SPEC.built()
    server = await asyncio.get_running_loop().create_server(Server, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        # A test that expects silence waits no longer than the timeout; the others end earlier.
        h2spec = await asyncio.create_subprocess_exec(
            *(path, "--strict", "--timeout", "5", "--port", str(port)),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await h2spec.communicate()
    text = output.decode()
    failures = text.partition("Failures:")[2]
    assert re.search(r"^146 tests, 146 passed, 0 skipped, 0 failed$", text, re.MULTILINE), failures or text
