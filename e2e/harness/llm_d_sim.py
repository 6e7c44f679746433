"""llm-d-inference-sim: a simulator of vLLM that another project wrote, with KV events in its own dialect.

Its publisher connects to a subscriber, while the router connects to publishers. A forwarder listens at both ends: the
simulator publishes to it, and the router subscribes at the member's address.
"""

import asyncio
import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp
import zmq
import zmq.asyncio

from emulated_cluster.control_plane.build import binaries_folder
from harness.processes import START_TIMEOUT_S, Child
from harness.stack import PoolMember
from harness.waiting import until
from ports import reserved_port


class Forwarder:
    """Passes every message from the publisher that connects to ``publish_to`` to all subscribers at ``host:port``."""

    def __init__(self, *, host: str, port: int = 0) -> None:
        self._context = zmq.asyncio.Context()
        self._from: zmq.asyncio.Socket = self._context.socket(zmq.SUB)
        self._to: zmq.asyncio.Socket = self._context.socket(zmq.PUB)
        self._from.subscribe(b"")
        self._connections = self._from.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self.publish_to = _bound(self._from, f"tcp://{host}:*")
        self.port = int(_bound(self._to, f"tcp://{host}:{port or '*'}").rpartition(":")[2])
        self._task = asyncio.create_task(self._forward())

    async def connected(self) -> None:
        """Wait until the publisher has connected."""
        async with asyncio.timeout(START_TIMEOUT_S):
            await self._connections.recv_multipart()

    async def close(self) -> None:
        """Close both ends."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._context.destroy(linger=0)

    async def _forward(self) -> None:
        while True:
            await self._to.send_multipart(await self._from.recv_multipart())


class LlmDSim(Child):
    """A running ``llm-d-inference-sim`` with its KV cache, and the forwarder of its events at the member's address."""

    def __init__(
        self, *, directory: Path, name: str, host: str, events_port: int = 0, arguments: Sequence[str] = ()
    ) -> None:
        self.host = host
        self.port = reserved_port(host)
        self._forwarder = Forwarder(host=host, port=events_port)
        self.events_port = self._forwarder.port
        argv: list[str | Path] = [
            *(binaries_folder() / "llm-d-inference-sim", "--model", "qwen-model", "--port", str(self.port)),
            *("--mode", "echo", "--max-model-len", "32768"),
            *("--enable-kvcache", "--force-dummy-tokenizer", "--zmq-endpoint", self._forwarder.publish_to),
            *arguments,
        ]
        super().__init__(name, argv, directory=directory, environment={**os.environ, "POD_IP": host})

    @property
    def endpoint(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def member(self) -> PoolMember:
        """This engine as a member of a pool."""
        return PoolMember(id=self.name, address=self.host, port=self.port)

    async def start(self) -> None:
        """Start the engine and wait until it answers and publishes."""
        await super().start()
        await until(self._answers, f"{self.name} answers", timeout_s=START_TIMEOUT_S)
        await self._forwarder.connected()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await super().__aexit__(kind, error, traceback)
        await self._forwarder.close()

    async def __aenter__(self) -> Self:
        try:
            return await super().__aenter__()
        except BaseException:
            await self.__aexit__(None, None, None)
            raise

    async def _answers(self) -> bool:
        assert self.returncode is None, self.output()[-4000:]
        try:
            async with aiohttp.ClientSession() as session, session.get(f"http://{self.endpoint}/health") as response:
                return response.status == 200
        except aiohttp.ClientError:
            return False


def _bound(bound: "zmq.Socket[Any]", endpoint: str) -> str:
    bound.bind(endpoint)
    return str(bound.getsockopt_string(zmq.LAST_ENDPOINT))
