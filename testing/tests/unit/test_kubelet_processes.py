"""Tests of the kubelet's processes: probes, restarts and hooks; no process remains after the end."""

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from aiohttp import web
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from emulated_cluster.kubelet.containers.actions import ActionTarget, perform
from emulated_cluster.kubelet.containers.containers import NodeSettings, PodLocation
from emulated_cluster.kubelet.containers.probes import Probe, Tally
from emulated_cluster.kubelet.containers.process_containers import ProcessContainer
from emulated_cluster.kubelet.containers.runtimes import HostRuntime
from emulated_cluster.kubelet.containers.status import Running, Terminated
from emulated_cluster.kubelet.isolation.processes import run
from emulated_cluster.kubelet.pod_spec.environment import Values
from kubelet_objects import pod
from waiting import until
from web_server import WebServer

SHELL = ["/bin/sh", "-c"]


FOREVER = "while :; do sleep 0.05; done"


def test_probe_result_changes_at_its_thresholds() -> None:
    spec = {"readinessProbe": {"successThreshold": 2, "failureThreshold": 3}}
    probe = Probe.read(spec, "readinessProbe")
    assert probe is not None
    tally = Tally(probe)

    verdicts = [tally.add(success) for success in (True, True, True, False, False, True, False, False, False)]

    assert verdicts == [None, True, True, None, None, None, None, None, False]


async def test_http_probe_succeeds_on_redirect_and_fails_on_error() -> None:
    async def answer(request: web.Request) -> web.Response:
        assert request.headers["X-Probe"] == "yes"
        return web.Response(status=int(request.match_info["status"]), headers={"Location": "/500"})

    app = web.Application()
    app.router.add_get("/{status}", answer)
    async with WebServer(app) as server:
        port = server.port
        where = action_target(http=port)
        header = {"httpHeaders": [{"name": "X-Probe", "value": "yes"}]}
        answers = [
            await perform({"httpGet": {"port": "http", "path": f"/{status}", **header}}, where, timeout_s=10)
            for status in (200, 302, 404, 503)
        ]
        connects = [await perform({"tcpSocket": {"port": port}}, where, timeout_s=10)]
    connects.append(await perform({"tcpSocket": {"port": port}}, where, timeout_s=10))

    assert answers == [True, True, False, False]
    assert connects == [True, False]
    assert not await perform({"tcpSocket": {"port": "unnamed"}}, where, timeout_s=10)


async def test_grpc_probe_checks_its_service() -> None:
    servicer = health.HealthServicer()
    servicer.set("up", health_pb2.HealthCheckResponse.SERVING)
    servicer.set("down", health_pb2.HealthCheckResponse.NOT_SERVING)
    server = grpc.server(ThreadPoolExecutor(max_workers=1))
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        answers = [
            await perform({"grpc": {"port": port, "service": service}}, action_target(), timeout_s=10)
            for service in ("up", "down", "unknown")
        ]
    finally:
        server.stop(None).wait()

    assert answers == [True, False, False]


async def test_hung_exec_probe_is_killed(tmp_path: Path) -> None:
    where = action_target(log=tmp_path / "log")
    script = f"echo $$ > {tmp_path}/pid; {FOREVER}"

    assert await perform({"exec": {"command": [*SHELL, "exit 0"]}}, where, timeout_s=10)
    assert not await perform({"exec": {"command": [*SHELL, "exit 1"]}}, where, timeout_s=10)
    assert not await perform({"exec": {"command": [*SHELL, script]}}, where, timeout_s=3)

    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


async def test_child_processes_end_when_container_command_ends(tmp_path: Path) -> None:
    where = action_target(log=tmp_path / "log")
    script = f"( {FOREVER} ) & echo $! > {tmp_path}/child"

    assert await perform({"exec": {"command": [*SHELL, script]}}, where, timeout_s=10)

    await until(lambda: not alive(int((tmp_path / "child").read_text())))


async def test_crashed_container_restarts_and_reports_its_exit(tmp_path: Path) -> None:
    async with running({"command": [*SHELL, FOREVER]}, tmp_path) as container:
        await until(lambda: container.view.ready)
        container.crash()
        await until(lambda: container.view.restarts == 1 and container.view.ready)

        last = container.view.last

    assert last is not None
    assert last.exit_code == 137


async def test_pre_stop_runs_before_sigterm(tmp_path: Path) -> None:
    script = f"trap 'echo term; exit 7' TERM; echo up; {FOREVER}"
    hook = {"preStop": {"exec": {"command": [*SHELL, "echo before; sleep 0.2; echo after"]}}}
    async with running({"command": [*SHELL, script], "lifecycle": hook}, tmp_path) as container:
        await until(lambda: container.log.exists() and "up" in container.log.read_text())
        container.stop(60)
        await until(lambda: isinstance(container.view.state, Terminated))

    assert container.log.read_text().split() == ["up", "before", "after", "term"]
    assert isinstance(container.view.state, Terminated)
    assert container.view.state.exit_code == 7


async def test_failed_startup_probe_restarts_the_container(tmp_path: Path) -> None:
    probe = {"exec": {"command": ["false"]}, "failureThreshold": 1}
    async with running({"command": [*SHELL, FOREVER], "startupProbe": probe}, tmp_path) as container:
        await until(lambda: container.view.restarts == 1)

        assert not container.view.started


async def test_failed_liveness_probe_restarts_the_container(tmp_path: Path) -> None:
    flag = tmp_path / "alive"
    flag.touch()
    probe = {"exec": {"command": ["test", "-e", str(flag)]}, "failureThreshold": 1, "periodSeconds": 0.05}
    async with running({"command": [*SHELL, FOREVER], "livenessProbe": probe}, tmp_path) as container:
        await until(lambda: container.view.ready)
        assert container.view.restarts == 0
        flag.unlink()
        await until(lambda: container.view.restarts == 1)


@pytest.mark.parametrize(
    ("policy", "exit_code", "again"),
    [("Never", 1, False), ("OnFailure", 0, False), ("OnFailure", 1, True), ("Always", 0, True)],
)
async def test_restart_policy_decides_if_container_restarts(
    policy: str, exit_code: int, again: bool, tmp_path: Path
) -> None:
    spec = {"command": [*SHELL, f"exit {exit_code}"]}
    async with running(spec, tmp_path, policy=policy) as container:
        await until(lambda: isinstance(container.view.state, Terminated) or container.view.restarts > 0)

        if again:
            await until(lambda: container.view.restarts > 0)
        else:
            assert container.view.restarts == 0
            assert isinstance(container.view.state, Terminated)
            assert container.view.state.exit_code == exit_code


async def test_readiness_probe_continues_during_termination(tmp_path: Path) -> None:
    flag = tmp_path / "ready"
    flag.touch()
    probe = {"exec": {"command": ["test", "-e", str(flag)]}, "failureThreshold": 1, "periodSeconds": 0.05}
    hook = {"preStop": {"sleep": {"seconds": 60}}}
    spec = {"command": [*SHELL, FOREVER], "readinessProbe": probe, "lifecycle": hook}
    async with running(spec, tmp_path) as container:
        await until(lambda: container.view.ready)
        container.stop(60)
        flag.unlink()
        await until(lambda: not container.view.ready)

        assert isinstance(container.view.state, Running)
        container.stop(0)
        await until(lambda: isinstance(container.view.state, Terminated))


async def test_cancelled_container_leaves_no_process(tmp_path: Path) -> None:
    script = f"sh -c '{FOREVER}' & echo $! > {tmp_path}/child; wait"
    async with running({"command": [*SHELL, script]}, tmp_path) as container:
        await until(lambda: (tmp_path / "child").exists() and (tmp_path / "child").read_text().endswith("\n"))
        assert container.pid is not None
        left = [container.pid, int((tmp_path / "child").read_text())]

    await until(lambda: not any(map(alive, left)))


@asynccontextmanager
async def running(spec: Mapping[str, Any], folder: Path, *, policy: str = "Always") -> AsyncIterator[ProcessContainer]:
    node = NodeSettings(
        environment={"PATH": os.environ["PATH"]},
        logs=folder,
        images={},
        nameserver=None,
        api_server=("127.0.0.1", 6443),
        folder=folder,
        memory=folder,
    )
    location = PodLocation(address="127.0.0.1", host_address="127.0.0.1", node=node)
    whole = pod(restartPolicy=policy)
    engine = {"name": "engine", **spec}

    async def lookup(kind: str, name: str) -> Values:
        return None

    runtime = HostRuntime(whole, engine, location, lookup)
    container = ProcessContainer(whole, engine, location, runtime, on_change=ignored)
    life = asyncio.create_task(container.run())
    try:
        yield container
    finally:
        life.cancel()
        await asyncio.gather(life, return_exceptions=True)


def ignored() -> None:
    return


def alive(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def action_target(*, log: Path = Path(os.devnull), **ports: int) -> ActionTarget:
    async def execute(command: Sequence[str]) -> int:
        return await run(command, environment={"PATH": os.environ["PATH"]}, log=log)

    return ActionTarget(address="127.0.0.1", ports=ports, execute=execute)
