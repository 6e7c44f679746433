"""The processes ``dualmap router`` and ``dualmap engine-sim``, and the router's pool files."""

import json
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from harness import fail_open, movable_clocks
from harness.processes import Child, dualmap_argv, python_argv
from ports import reserved_port

HASH_KEY = b"the hash key of the end-to-end tests"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolMember:
    """A member as a pool file lists it."""

    id: str
    address: str
    port: int
    state: str = "Active"
    weight: int = 100


# The transport of the routers' gRPC port; by default the router's own default.
TRANSPORT = os.environ.get("DUALMAP_E2E_TRANSPORT")
TRANSPORT_OPTION = [] if TRANSPORT is None else ["--transport", TRANSPORT]


def pool_document(
    members: Sequence[PoolMember],
    *,
    name: str = "qwen",
    namespace: str = "llm",
    model: str = "qwen-model",
    version: int = 1,
    spec: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return an InferencePool object; ``spec`` adds fields or replaces the model."""
    listed = [{"id": m.id, "address": m.address, "port": m.port, "state": m.state, "weight": m.weight} for m in members]
    return {
        "apiVersion": "serving.dualmap.dev/v1alpha1",
        "kind": "InferencePool",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"model": {"name": model}, **(spec or {})},
        "status": {"ring": {"version": version, "members": listed}},
    }


def write_pool(path: Path, document: Mapping[str, Any]) -> Path:
    """Write a pool file atomically by rename, as editors and ConfigMaps do (JSON is YAML)."""
    fresh = path.with_name(f"{path.name}.new")
    fresh.write_text(json.dumps(document, indent=2))
    fresh.rename(path)
    return path


class Router(Child):
    """A ``dualmap router`` on reserved ports of 127.0.0.1, or on the given ones after a restart.

    All routers have the same hash key, so that a prompt has the same pair in every run. With ``with_movable_clocks`` a
    test can move the router's clocks.
    """

    def __init__(
        self,
        pools: Sequence[Path],
        *,
        directory: Path,
        name: str = "router",
        arguments: Sequence[str] = (),
        ports: Mapping[str, int] | None = None,
        with_movable_clocks: bool = False,
    ) -> None:
        fixed = ports or {}
        self._hash_key = directory / f"{name}.key"
        argv = ["router", "--host", "127.0.0.1", "--replica-id", name, "--hash-key-file", str(self._hash_key)]
        argv += TRANSPORT_OPTION
        argv += arguments
        argv += [part for pool in pools for part in ("--pool", str(pool))]
        for port in ("grpc", "health", "metrics", "als"):
            argv += [f"--{port}-port", str(fixed.get(port) or reserved_port())]
        self._offsets = directory / f"{name}.clocks"
        run = python_argv(movable_clocks.__file__, self._offsets, *argv) if with_movable_clocks else dualmap_argv(*argv)
        super().__init__(name, run, directory=directory)
        self.ports: dict[str, int] = {}

    def set_clock_offsets(self, *, wall_s: float = 0.0, monotonic_s: float = 0.0) -> None:
        """Set the offsets of the router's clocks from the machine's clocks, in seconds."""
        self._offsets.write_text(json.dumps({"wall_s": wall_s, "monotonic_s": monotonic_s}))
        os.kill(self.pid, signal.SIGUSR1)

    async def start(self) -> None:
        """Start the router and wait for its ready line, which has the ports."""
        self._hash_key.write_bytes(HASH_KEY)
        before = len(self.output())
        await super().start()
        line = await self.wait_for_line(r"dualmap router ready (.*)", after=before)
        pairs = (part.split("=", 1) for part in line[1].split())
        self.ports = {kind: int(address.rpartition(":")[2]) for kind, address in pairs}
        fail_open.watch_router(self, self._status)

    async def stop(self) -> int:
        """Stop the router as every child, and count its failures before."""
        fail_open.end(self)
        return await super().stop()

    def keep_ports(self) -> None:
        """Use the current ports again at the next start."""
        for kind, port in self.ports.items():
            self.argv[self.argv.index(f"--{kind}-port") + 1] = str(port)

    async def page(self, pool: str) -> dict[str, dict[str, Any]]:
        """Return the endpoints of ``GET /pools/llm/POOL`` by member id."""
        async with aiohttp.ClientSession() as session, session.get(f"{self._status}/pools/llm/{pool}") as response:
            document = await response.json()
        return {endpoint["id"]: endpoint for endpoint in document["endpoints"]}

    async def metric(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's samples with these labels."""
        async with aiohttp.ClientSession() as session, session.get(f"{self._status}/metrics") as response:
            text = await response.text()
        samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
        return sum(
            sample.value for sample in samples if sample.name == name and labels.items() <= sample.labels.items()
        )

    @property
    def _status(self) -> str:
        return f"http://127.0.0.1:{self.ports['metrics']}"


class Engine(Child):
    """A ``dualmap engine-sim`` on a reserved or a given port; a restart uses the same ports.

    With ``kv_events``, the engine publishes KV events on reserved ports.
    """

    def __init__(
        self,
        *,
        directory: Path,
        name: str,
        host: str = "127.0.0.1",
        port: int = 0,
        arguments: Sequence[str] = (),
        kv_events: bool = False,
    ) -> None:
        self._arguments = ("--model", "qwen-model", *arguments)
        super().__init__(name, (), directory=directory)
        self.host = host
        self.port = port or reserved_port(host)
        self._kv_ports = (reserved_port(host), reserved_port(host)) if kv_events else None

    @property
    def endpoint(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def member(self) -> PoolMember:
        """This engine as a member of a pool."""
        return PoolMember(id=self.name, address=self.host, port=self.port)

    async def start(self) -> None:
        """Start the engine and wait for its ready line."""
        before = len(self.output())
        self.argv = dualmap_argv("engine-sim", "--host", self.host, "--port", str(self.port), *self._arguments)
        if self._kv_ports is not None:
            live, replay = map(str, self._kv_ports)
            self.argv += ["--kv-events", "--kv-events-port", live, "--kv-events-replay-port", replay]
        await super().start()
        await self.wait_for_line(r"ready.*\n", after=before)
