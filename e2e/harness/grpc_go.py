"""A client of grpc-go, for tests of the gRPC port: the test controls its streams one by one."""

import asyncio
import base64
import json
from collections import defaultdict
from collections.abc import Iterable
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from harness.go_programs import GoProgram

_PROGRAM: Final = GoProgram(name="grpc_go", folder=Path(__file__).parents[1] / "grpc_go", package=".")
# The longest line of the client has one message in base64.
_LINE_BYTES: Final = 64 << 20


class GoClient:
    """A process with one connection to ``target``.

    With ``ping_s``, the client sends a PING after this time without a byte, at least 10 s, and closes the connection if
    the server does not answer within ``pong_s``. With ``ca``, a file, the client uses TLS; ``pair`` is the folder of
    the client's certificate.
    """

    def __init__(
        self, target: str, *, ping_s: float = 0.0, pong_s: float = 1.0, ca: Path | None = None, pair: Path | None = None
    ) -> None:
        self._arguments = [f"--target={target}", f"--ping={ping_s}s", f"--pong={pong_s}s"]
        self._arguments += [f"--{name}={path}" for name, path in (("ca", ca), ("pair", pair)) if path is not None]
        self._numbers = count(1)
        self._streams: defaultdict[int, asyncio.Queue[bytes | str]] = defaultdict(asyncio.Queue)
        self._state_changed = asyncio.Event()
        self._process: asyncio.subprocess.Process
        self._reading: asyncio.Task[None]
        self.states: list[str] = []
        """The connection's states in gRPC's notation, from the first to the present one."""

    def open(self, method: str, *, timeout_s: float = 0.0, gzip: bool = False) -> "GoStream":
        """Begin a stream; 0: without a deadline."""
        stream = GoStream(self, next(self._numbers))
        self.command(do="open", stream=stream.number, method=method, timeout_ms=int(timeout_s * 1000), gzip=gzip)
        return stream

    def command(self, **fields: Any) -> None:
        """Send a command to the process."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(fields).encode() + b"\n")

    async def received(self, stream: int) -> bytes | str:
        """Return the next message of a stream, or its final status code."""
        return await self._streams[stream].get()

    async def reaches(self, state: str) -> None:
        """Wait until the connection has this state."""
        while self.states[-1:] != [state]:
            self._state_changed.clear()
            await self._state_changed.wait()

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            *(await _PROGRAM.built(), *self._arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_LINE_BYTES,
        )
        self._reading = asyncio.create_task(self._read())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.kill()
        await self._process.wait()
        await self._reading

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            happened = json.loads(line)
            if state := happened.get("state"):
                self.states.append(state)
                self._state_changed.set()
            else:
                code = happened.get("code")
                message = base64.b64decode(happened.get("message", ""))
                self._streams[happened["stream"]].put_nowait(code or message)


class GoStream:
    """A stream of a client."""

    def __init__(self, client: GoClient, number: int) -> None:
        self.number = number
        self._client = client

    def send(self, messages: Iterable[bytes]) -> None:
        """Send messages. They wait in the client for the server's windows."""
        for message in messages:
            encoded = base64.b64encode(message).decode()
            self._client.command(do="send", stream=self.number, message=encoded)

    def end(self) -> None:
        """Send the half close, after all messages."""
        self._client.command(do="end", stream=self.number)

    def cancel(self) -> None:
        """Cancel the stream."""
        self._client.command(do="cancel", stream=self.number)

    async def read(self) -> bytes:
        """Return the next message."""
        received = await self._client.received(self.number)
        assert isinstance(received, bytes), received
        return received

    async def code(self) -> str:
        """Return the final status code, such as ``OK``, after the messages that were not read."""
        while isinstance(received := await self._client.received(self.number), bytes):
            pass
        return received
