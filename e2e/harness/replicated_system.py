"""The system of the fault tests: three engines, two routers that share a Redis, one Envoy, and steady traffic.

The system starts once per session. It must recover from every fault without a restart, so that the next test starts
with a healthy system. ``replicas`` runs routers and Envoy, ``traffic`` runs the clients, and ``resources`` finds leaks.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from dualmap_extproc.envoy.config.settings import Mode
from harness.documents import document, prompt_of
from harness.envoy import Envoy
from harness.replicas import Replicas
from harness.resources import ProcessResources
from harness.stack import Engine
from harness.traffic import Traffic
from redis_server import RedisServer

POOL = "fleet"
ENGINES = 3
# The engines run at twice the real speed, so that a request takes about half a second.
SPEED = "2"
PREFIXES = 12


class ReplicatedSystem:
    """Engines, Redis, and ``replicas``; ``before`` has the resources of the replicas' processes after the start."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self._directory = directory
        self._stack = AsyncExitStack()
        self.redis = RedisServer(directory / "redis")
        self.engines = [self._engine(number, SPEED) for number in range(ENGINES)]
        self.replicas: Replicas
        self.before: dict[str, ProcessResources] = {}

    def document(self, *engines: Engine, version: int = 1) -> dict[str, Any]:
        """Return the pool with these members."""
        return document(POOL, [engine.member for engine in engines], version=version, slo={"ttft": "2s"})

    def traffic(self, *, of: Replicas | None = None, envoy: Envoy | None = None, session: str = "") -> Traffic:
        """Return clients of an Envoy, which send prompts with a dozen shared prefixes, all in one ``session``."""
        asked = envoy or (of or self.replicas).envoy
        return Traffic(lambda: asked.url, lambda number: body(number, session))

    @asynccontextmanager
    async def another(self, mode: Mode, directory: Path) -> AsyncIterator[Replicas]:
        """Run routers and an Envoy in another message mode with the same engines, without Redis."""
        async with Replicas({POOL: self.document(*self.engines)}, directory=directory, mode=mode) as replicas:
            yield replicas

    async def heal(self) -> None:
        """Repair all faults that a failed test did not repair."""
        for engine in self.engines:
            engine.resume()
            if engine.returncode is not None:
                await engine.start()
        await self.replicas.heal()

    async def wait_for_rest(self) -> None:
        """Wait until all load gauges are zero, no request is open, and no resource has leaked."""
        await self.replicas.wait_for_rest()
        await self.replicas.wait_for_release(self.before)

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:  # a failed start must leave no process behind
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def restart_engine(self, number: int, *, speed: str = SPEED) -> None:
        """Kill an engine and restart it on the same port with this ``engine-sim --speed``."""
        port = self.engines[number].port
        await self.engines[number].kill()
        self.engines[number] = self._engine(number, speed, port=port)
        await self.engines[number].start()

    def _engine(self, number: int, speed: str, *, port: int = 0) -> Engine:
        arguments = ("--model", f"{POOL}-model", "--speed", speed)
        return Engine(directory=self._directory, name=f"engine-{number}", port=port, arguments=arguments)

    async def _start(self) -> None:
        self._stack.callback(self.redis.kill)
        self.redis.start()
        self._stack.push_async_callback(self._stop_engines)
        await asyncio.gather(*(engine.start() for engine in self.engines))
        pools = {POOL: self.document(*self.engines)}
        arguments = ("--redis", self.redis.url)
        self.replicas = Replicas(pools, directory=self._directory, router_arguments=arguments)
        await self._stack.enter_async_context(self.replicas)
        traffic = self.traffic()
        async with traffic.running():
            await traffic.flowing(40)
        await self.replicas.wait_for_rest()
        self.before = self.replicas.resources()

    async def _stop_engines(self) -> None:
        await asyncio.gather(*(engine.stop() for engine in self.engines))


def body(number: int, session: str) -> dict[str, Any]:
    """Return a chat completions body: one of a dozen prefixes, or for each fourth request a new one, and a question."""
    # No engine has cached a new prefix, so an engine that restarted with an empty cache gets some of these requests.
    prefix = number if number % 4 == 0 else number % PREFIXES
    prompt = prompt_of(3, seed=f"prefix {prefix}") + f" question {number}"
    return {"model": f"{POOL}-model", "messages": [{"role": "user", "content": prompt}], "max_tokens": 30} | (
        {"session_id": session} if session else {}
    )
