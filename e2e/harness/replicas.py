"""Several routers behind one Envoy in front of the same engines, as in production.

``deployment`` has one router and one Envoy. Each router has its own pool files, so that tests can configure different
pools. Tests can kill, pause and restart every process on its ports.
"""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from click.testing import CliRunner

from dualmap_cli.main import main
from dualmap_extproc.envoy.config.settings import Mode
from harness.envoy import Envoy
from harness.processes import Child
from harness.resources import ProcessResources, resources_of, wait_for_release
from harness.stack import Router, write_pool
from harness.waiting import until
from ports import reserved_port

REST_TIMEOUT_S = 60.0
GAUGES = (
    "dualmap_endpoint_in_flight_requests",
    "dualmap_endpoint_pending_prefill_tokens",
    "dualmap_endpoint_active_kv_tokens",
    "dualmap_endpoint_held_requests",
    "dualmap_pool_held_requests",
)

Document = Mapping[str, Any]


class Replicas:
    """Routers and one Envoy in front of the caller's engines; ``pools`` maps pool names to pool documents.

    With ``peers``, the routers know each other's addresses (``--peer``).
    """

    def __init__(
        self,
        pools: Mapping[str, Document],
        *,
        directory: Path,
        routers: int = 2,
        mode: Mode = Mode.STREAMED,
        router_arguments: tuple[str, ...] = (),
        peers: bool = False,
    ) -> None:
        self._directory = directory
        self._mode = mode
        self._router_arguments = router_arguments
        self._pools = tuple(pools)
        for number in range(routers):
            (directory / f"router-{number}").mkdir(parents=True)
            for name, document in pools.items():
                self.write(name, document, only=number)
        fixed: list[dict[str, int]] = [{"grpc": reserved_port()} if peers else {} for _ in range(routers)]
        for ports in fixed if peers else ():
            self._router_arguments += ("--peer", f"127.0.0.1:{ports['grpc']}")
        self.routers = [self._router(number, ports) for number, ports in enumerate(fixed)]
        self.envoy: Envoy

    def write(self, pool: str, document: Document, *, only: int | None = None) -> None:
        """Replace a pool's file for every router, or only for router number ``only``."""
        folders = self._directory.glob("router-?") if only is None else [self._directory / f"router-{only}"]
        for folder in folders:
            write_pool(folder / f"{pool}.json", document)

    async def start(self) -> None:
        """Start the routers, then Envoy; return when all are ready."""
        await asyncio.gather(*(router.start() for router in self.routers))
        self.envoy = self.another_envoy("envoy")
        await self.envoy.start()

    async def stop(self) -> None:
        """Stop Envoy and the routers."""
        await self.envoy.stop()
        await asyncio.gather(*(router.stop() for router in self.routers))

    async def restart_router(self, number: int) -> None:
        """Start a router on the ports of the previous router."""
        assert self.routers[number].returncode is not None, "the router is still running"
        self.routers[number] = self._router(number, self.routers[number].ports)
        await self.routers[number].start()

    async def heal(self) -> None:
        """Resume every paused process and restart every ended process."""
        for number, router in enumerate(self.routers):
            router.resume()
            if router.returncode is not None:
                await self.restart_router(number)
        if self.envoy.child.returncode is not None:
            await self.envoy.start()

    async def end_router(self, number: int) -> None:
        """Send SIGTERM to a router and wait until it has drained; fail if the exit status is not 0."""
        self.routers[number].terminate()
        assert await self.routers[number].wait() == 0

    async def in_use(self, number: int, *, more: int = 8) -> None:
        """Wait until a router has routed ``more`` additional requests."""
        router = self.routers[number]
        before = await router.metric("dualmap_requests_total")

        async def asked() -> bool:
            return await router.metric("dualmap_requests_total") >= before + more

        await until(asked, f"{router.name} routes requests", timeout_s=REST_TIMEOUT_S)

    async def wait_for_metric(self, name: str, value: float, *, of: int, **labels: str) -> None:
        """Wait until a router's metric has this value."""
        router = self.routers[of]

        async def has() -> bool:
            return await router.metric(name, **labels) == value

        await until(has, f"{router.name}: {name}{labels or ''} is {value}", timeout_s=REST_TIMEOUT_S)

    async def wait_for_rest(self) -> None:
        """Wait until no running router has load or queued requests, and Envoy has no open request."""
        for router in self.routers:
            if router.returncode is not None:
                continue

            async def idle(router: Router = router) -> bool:
                return not any([await router.metric(gauge) for gauge in GAUGES])

            await until(idle, f"the gauges of {router.name} are zero", timeout_s=REST_TIMEOUT_S)

        async def quiet() -> bool:
            stats = await self.envoy.stats(r"^(http.requests.downstream|cluster.*upstream)_rq_active$")
            pools = [f"cluster.llm/{pool}.upstream_rq_active" for pool in self._pools]
            return not any(stats.get(name, 0) for name in ("http.requests.downstream_rq_active", *pools))

        await until(quiet, "Envoy has no request", timeout_s=REST_TIMEOUT_S)

    def resources(self) -> dict[str, ProcessResources]:
        """Return the resources of each running process, by name."""
        return {name: resources_of(pid) for name, pid in self._pids().items()}

    async def wait_for_release(self, before: Mapping[str, ProcessResources]) -> None:
        """Wait until no process holds clearly more resources than the process of the same name did before."""
        await wait_for_release(before, self._pids())

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:  # a failed start must leave no process behind
            await asyncio.gather(*(router.stop() for router in self.routers))
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    def _pids(self) -> dict[str, int]:
        children: list[Child] = [*self.routers, self.envoy.child]
        return {child.name: child.pid for child in children if child.returncode is None}

    def _router(self, number: int, ports: Mapping[str, int]) -> Router:
        name = f"router-{number}"
        files = [self._directory / name / f"{pool}.json" for pool in self._pools]
        return Router(
            files,
            directory=self._directory,
            name=name,
            arguments=self._router_arguments,
            ports=ports,
            with_movable_clocks=True,
        )

    def another_envoy(self, name: str, *, access_log: str | None = None) -> Envoy:
        """Return an Envoy for all routers, not yet started; ``access_log`` is its access log's address (None: the
        routers).
        """
        arguments = ["envoy-config", "--mode", self._mode.value]
        arguments += [part for pool in self._pools for part in ("--pool", f"{self._directory}/router-0/{pool}.json")]
        arguments += ["--router", self._addresses("grpc"), "--als", access_log or self._addresses("als")]
        arguments += ["--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"]
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == 0, result.output
        return Envoy(result.stdout, directory=self._directory, concurrency=2, name=name)

    def _addresses(self, port: str) -> str:
        return ",".join(f"127.0.0.1:{router.ports[port]}" for router in self.routers)
