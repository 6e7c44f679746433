"""One deployment: pool files, ``dualmap router``, and Envoy configured by ``dualmap envoy-config``.

``stack`` starts single processes. ``envoy`` runs Envoy. A deployment can change pools, kill the router, restart the
router on its ports, and read its status pages.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from click.testing import CliRunner

from dualmap_cli.main import main
from dualmap_extproc.envoy.config.settings import Mode
from harness.clients import Reply, http1
from harness.envoy import Envoy
from harness.stack import Router, write_pool
from harness.upstream import ENGINE_HEADER
from harness.waiting import until

CHAT = "/v1/chat/completions"
REST_TIMEOUT_S = 60.0

Document = Mapping[str, Any]
Edit = Callable[[str], str]


class Deployment:
    """One router and one Envoy in front of the caller's engines; ``pools`` maps pool names to pool documents."""

    def __init__(
        self,
        pools: Mapping[str, Document],
        *,
        mode: Mode,
        directory: Path,
        workers: int = 2,
        tls: bool = False,
        router_arguments: tuple[str, ...] = (),
        envoy_arguments: tuple[str, ...] = (),
    ) -> None:
        self.mode = mode
        self._directory = directory
        self._workers = workers
        self._router_arguments = (*router_arguments, *(("--tls", "self-signed") if tls else ()))
        self._envoy_arguments = (*envoy_arguments, *(("--tls", "on") if tls else ()))
        self._files = {name: directory / f"{name}.json" for name in pools}
        for name, document in pools.items():
            self.write(name, document)
        self.router = self._router(ports={})
        self.envoy: Envoy

    def write(self, pool: str, document: Document) -> None:
        """Replace a pool's file, which the router then reloads."""
        write_pool(self._files[pool], document)

    async def start(self) -> None:
        """Start the router, then Envoy; return when Envoy accepts requests."""
        await self.router.start()
        self.envoy = self.another_envoy("envoy")
        await self.envoy.start()

    async def stop(self) -> None:
        """Stop Envoy and the router."""
        await self.envoy.stop()
        await self.router.stop()

    def another_envoy(self, name: str, *, edit: Edit | None = None, arguments: tuple[str, ...] | None = None) -> Envoy:
        """Return another Envoy for the same router, not yet started; ``edit`` can change the Envoy's YAML.

        ``arguments`` are for ``dualmap envoy-config`` (None: the deployment's arguments).
        """
        config = self._envoy_config(self._envoy_arguments if arguments is None else arguments)
        return Envoy(edit(config) if edit else config, directory=self._directory, concurrency=self._workers, name=name)

    async def kill_router(self) -> None:
        """Kill the router (SIGKILL)."""
        await self.router.kill()

    async def restart_router(self) -> None:
        """Start a router on the ports of the previous router, and wait until Envoy uses the new router."""
        assert self.router.returncode is not None, "the router is still running"
        self.router = self._router(ports=self.router.ports)
        await self.router.start()
        await self.wait_until_asked()

    async def wait_until_asked(self) -> None:
        """Wait until every Envoy worker sends its requests to the router again."""
        in_a_row = 0

        async def asked() -> bool:
            nonlocal in_a_row
            reply = await http1(self.envoy.url + CHAT, body=b"{}")
            # Without the router, an engine rejects the body; engines sign their answers.
            asked_router = reply.status == 400 and ENGINE_HEADER not in reply.headers
            in_a_row = in_a_row + 1 if asked_router else 0
            return in_a_row >= 4 * self._workers

        await until(asked, "Envoy uses the router", timeout_s=REST_TIMEOUT_S)

    async def wait_until_served_without_router(self) -> None:
        """Wait until Envoy answers requests without a router.

        In the default mode and in BUFFERED, Envoy fails open at once. In FULL_DUPLEX, Envoy fails open only when every
        worker has detected that no router is healthy. Before this, requests get 503.
        """
        if self.mode is not Mode.FULL_DUPLEX:
            return
        in_a_row = 0

        async def served() -> bool:
            nonlocal in_a_row
            reply = await http1(self.envoy.url + CHAT, body=b"{}")
            assert reply.status in (200, 503), reply
            in_a_row = in_a_row + 1 if reply.status == 200 else 0
            return in_a_row >= 4 * self._workers

        await until(served, "Envoy knows that the router is gone")

    async def ask(
        self,
        body: Mapping[str, Any] | bytes,
        *,
        path: str = CHAT,
        headers: Mapping[str, str] | None = None,
        chunk_bytes: int = 0,
        envoy: Envoy | None = None,
    ) -> Reply:
        """POST a body through Envoy."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        url = (envoy or self.envoy).url + path
        json_headers = {"content-type": "application/json", **(headers or {})}
        return await http1(url, body=data, headers=json_headers, chunk_bytes=chunk_bytes)

    async def page(self, pool: str) -> dict[str, dict[str, Any]]:
        """Return the endpoints of ``GET /pools/llm/POOL`` by member id."""
        return await self.router.page(pool)

    async def load(self, pool: str) -> tuple[int, int]:
        """Return the pool's requests in flight and pending prefill tokens, summed over its endpoints."""
        endpoints = (await self.page(pool)).values()
        return sum(each["in_flight"] for each in endpoints), sum(each["pending_prefill_tokens"] for each in endpoints)

    async def wait_for_load(self, pool: str, what: str, holds: Callable[[int, int], bool]) -> None:
        """Wait until ``holds`` returns true for the pool's requests in flight and pending prefill tokens."""

        async def true() -> bool:
            return holds(*await self.load(pool))

        await until(true, f"{pool}: {what}", timeout_s=REST_TIMEOUT_S)

    async def wait_for_rest(self) -> None:
        """Wait until no pool has load, on the status pages and in the gauges."""
        for pool in self._files:
            await self.wait_for_load(pool, "nothing in flight or pending", lambda *load: load == (0, 0))
        assert await self.metric("dualmap_endpoint_in_flight_requests") == 0
        assert await self.metric("dualmap_endpoint_pending_prefill_tokens") == 0

    async def metric(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's samples with these labels."""
        return await self.router.metric(name, **labels)

    async def wait_for_metric(self, name: str, value: float, **labels: str) -> None:
        """Wait until a metric has this value."""

        async def has() -> bool:
            return await self.metric(name, **labels) == value

        await until(has, f"{name}{labels or ''} is {value}", timeout_s=REST_TIMEOUT_S)

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:  # a failed start must leave no process behind
            await self.router.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    def _router(self, *, ports: Mapping[str, int]) -> Router:
        return Router(
            list(self._files.values()), directory=self._directory, arguments=self._router_arguments, ports=ports
        )

    def _envoy_config(self, envoy_arguments: tuple[str, ...]) -> str:
        """Run ``dualmap envoy-config`` in this process, because its imports take seconds."""
        ports = self.router.ports
        arguments = ["envoy-config"]
        arguments += [part for file in self._files.values() for part in ("--pool", str(file))]
        arguments += ["--router", f"127.0.0.1:{ports['grpc']}", "--als", f"127.0.0.1:{ports['als']}"]
        arguments += ["--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"]
        arguments += ["--mode", self.mode.value, *envoy_arguments]
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == 0, result.output
        return result.stdout
