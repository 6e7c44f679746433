"""Parts of the process kubelet of e2e/controlplane that need no API server: what it tells and reads, how it ends."""

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

from controlplane.kubelet.actions import Surroundings, perform
from controlplane.kubelet.containers import NodeSettings, Place
from controlplane.kubelet.environment import (
    ContainerConfigError,
    Field,
    Values,
    command_line,
    environment,
    expand,
    references,
    service_links,
)
from controlplane.kubelet.probes import Probe, Tally
from controlplane.kubelet.process_containers import ProcessContainer
from controlplane.kubelet.processes import run
from controlplane.kubelet.runtimes import HostRuntime
from controlplane.kubelet.status import (
    ContainerView,
    Placement,
    Running,
    State,
    Terminated,
    Waiting,
    pod_status,
)
from waiting import until

GATE = "serving.dualmap.dev/in-ring"
SHELL = ["/bin/sh", "-c"]
FOREVER = "while :; do sleep 0.05; done"


def pod(**spec: Any) -> dict[str, Any]:
    return {
        "metadata": {
            "name": "chat-0",
            "namespace": "team",
            "uid": "0f1e2d3c-0000",
            "generation": 3,
            "labels": {"apps.kubernetes.io/pod-index": "0"},
        },
        "spec": {"nodeName": "node-0", "containers": [{"name": "engine"}], **spec},
    }


@pytest.mark.parametrize(
    ("text", "expanded"),
    [
        ("$(HOST):$(PORT)", "10.0.0.1:80"),
        ("$(UNKNOWN)", "$(UNKNOWN)"),
        ("$$(HOST)", "$(HOST)"),
        ("a $ b $HOST", "a $ b $HOST"),
        ("$(HOST", "$(HOST"),
    ],
)
def test_references_to_variables(text: str, expanded: str) -> None:
    assert expand(text, {"HOST": "10.0.0.1", "PORT": "80"}) == expanded


def test_environment_reads_fields_and_refers_to_earlier_variables() -> None:
    container = {
        "name": "engine",
        "command": ["serve", "--url=$(URL)"],
        "args": ["$(INDEX)", "$(LATER)"],
        "env": [
            {"name": "EARLY", "value": "$(URL)"},
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "URL", "value": "http://$(POD_IP)/"},
            {
                "name": "INDEX",
                "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['apps.kubernetes.io/pod-index']"}},
            },
        ],
    }

    told = environment(container, fields(), base={"PATH": "/bin"}, objects=nothing)

    assert told == {
        "PATH": "/bin",
        "EARLY": "$(URL)",
        "POD_IP": "10.244.1.2",
        "URL": "http://10.244.1.2/",
        "INDEX": "0",
    }
    assert command_line(container, told) == ["serve", "--url=http://10.244.1.2/", "0", "$(LATER)"]


@pytest.mark.parametrize(
    ("container", "said"),
    [
        ({"env": [{"name": "A", "valueFrom": {"resourceFieldRef": {}}}]}, "env A: valueFrom.resourceFieldRef"),
        ({"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]}, 'env A: secret "s"'),
        ({"env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "spec.x"}}}]}, "fieldPath spec.x"),
        ({"envFrom": [{"configMapRef": {"name": "c"}}]}, 'envFrom: configMap "c" not found'),
        ({}, "command is missing"),
    ],
)
def test_what_cannot_be_given_is_refused(container: Mapping[str, Any], said: str) -> None:
    named = {"name": "engine", **container}

    with pytest.raises(ContainerConfigError, match=said):
        command_line(named, environment(named, fields(), base={}, objects=nothing))


def test_variables_come_from_config_maps_and_secrets() -> None:
    container = {
        "name": "engine",
        "envFrom": [{"configMapRef": {"name": "c"}, "prefix": "C_"}, {"secretRef": {"name": "gone", "optional": True}}],
        "env": [
            {"name": "PASSWORD", "valueFrom": {"secretKeyRef": {"name": "s", "key": "password"}}},
            {"name": "NONE", "valueFrom": {"secretKeyRef": {"name": "s", "key": "none", "optional": True}}},
            {"name": "URL", "value": "redis://:$(PASSWORD)@$(C_host)/"},
        ],
    }
    there = {("configMap", "c"): {"host": b"redis"}, ("secret", "s"): {"password": b"word"}}

    told = environment(container, fields(), base={}, objects=lambda kind, name: there.get((kind, name)))

    assert told == {"C_host": "redis", "PASSWORD": "word", "URL": "redis://:word@redis/"}
    assert references(container) == {*there, ("secret", "gone")}


def test_a_pod_is_told_of_its_namespaces_services() -> None:
    ports = [{"name": "http", "port": 80}, {"name": "tls", "port": 443, "protocol": "TCP"}]
    service = {"metadata": {"name": "front-door"}, "spec": {"clusterIP": "10.0.0.7", "ports": ports}}
    headless = {"metadata": {"name": "members"}, "spec": {"clusterIP": "None", "ports": ports}}

    told = service_links([service, headless])

    assert told == {
        "FRONT_DOOR_SERVICE_HOST": "10.0.0.7",
        "FRONT_DOOR_SERVICE_PORT": "80",
        "FRONT_DOOR_SERVICE_PORT_HTTP": "80",
        "FRONT_DOOR_SERVICE_PORT_TLS": "443",
        "FRONT_DOOR_PORT": "tcp://10.0.0.7:80",
        "FRONT_DOOR_PORT_80_TCP": "tcp://10.0.0.7:80",
        "FRONT_DOOR_PORT_80_TCP_PROTO": "tcp",
        "FRONT_DOOR_PORT_80_TCP_PORT": "80",
        "FRONT_DOOR_PORT_80_TCP_ADDR": "10.0.0.7",
        "FRONT_DOOR_PORT_443_TCP": "tcp://10.0.0.7:443",
        "FRONT_DOOR_PORT_443_TCP_PROTO": "tcp",
        "FRONT_DOOR_PORT_443_TCP_PORT": "443",
        "FRONT_DOOR_PORT_443_TCP_ADDR": "10.0.0.7",
    }


def test_an_image_without_command_has_its_entrypoint() -> None:
    container = {"name": "engine", "args": ["operator"]}

    assert command_line(container, {}, entrypoint=("dualmap",)) == ["dualmap", "operator"]
    assert command_line({**container, "command": ["sh"]}, {}, entrypoint=("dualmap",)) == ["sh", "operator"]


def test_a_probe_decides_after_as_many_answers_alike_as_its_thresholds_say() -> None:
    spec = {"readinessProbe": {"successThreshold": 2, "failureThreshold": 3}}
    probe = Probe.read(spec, "readinessProbe")
    assert probe is not None
    tally = Tally(probe)

    verdicts = [tally.add(success) for success in (True, True, True, False, False, True, False, False, False)]

    assert verdicts == [None, True, True, None, None, None, None, None, False]


async def test_an_http_probe_takes_redirects_for_success_and_errors_for_failure() -> None:
    async def answer(request: web.Request) -> web.Response:
        assert request.headers["X-Probe"] == "yes"
        return web.Response(status=int(request.match_info["status"]), headers={"Location": "/500"})

    app = web.Application()
    app.router.add_get("/{status}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        where = surroundings(http=port)
        header = {"httpHeaders": [{"name": "X-Probe", "value": "yes"}]}
        answers = [
            await perform({"httpGet": {"port": "http", "path": f"/{status}", **header}}, where, timeout_s=10)
            for status in (200, 302, 404, 503)
        ]
        connects = [await perform({"tcpSocket": {"port": port}}, where, timeout_s=10)]
    finally:
        await runner.cleanup()
    connects.append(await perform({"tcpSocket": {"port": port}}, where, timeout_s=10))

    assert answers == [True, True, False, False]
    assert connects == [True, False]
    assert not await perform({"tcpSocket": {"port": "unnamed"}}, where, timeout_s=10)


async def test_a_grpc_probe_asks_for_its_service() -> None:
    servicer = health.HealthServicer()
    servicer.set("up", health_pb2.HealthCheckResponse.SERVING)
    servicer.set("down", health_pb2.HealthCheckResponse.NOT_SERVING)
    server = grpc.server(ThreadPoolExecutor(max_workers=1))
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        answers = [
            await perform({"grpc": {"port": port, "service": service}}, surroundings(), timeout_s=10)
            for service in ("up", "down", "unknown")
        ]
    finally:
        server.stop(None).wait()

    assert answers == [True, False, False]


async def test_an_exec_probe_that_hangs_is_killed(tmp_path: Path) -> None:
    where = surroundings(log=tmp_path / "log")
    script = f"echo $$ > {tmp_path}/pid; {FOREVER}"

    assert await perform({"exec": {"command": [*SHELL, "exit 0"]}}, where, timeout_s=10)
    assert not await perform({"exec": {"command": [*SHELL, "exit 1"]}}, where, timeout_s=10)
    assert not await perform({"exec": {"command": [*SHELL, script]}}, where, timeout_s=1)

    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


async def test_what_a_command_leaves_running_ends_with_it(tmp_path: Path) -> None:
    where = surroundings(log=tmp_path / "log")
    script = f"( {FOREVER} ) & echo $! > {tmp_path}/child"

    assert await perform({"exec": {"command": [*SHELL, script]}}, where, timeout_s=10)

    await until(lambda: not alive(int((tmp_path / "child").read_text())))


def test_a_pod_is_ready_only_with_its_containers_and_every_gate() -> None:
    gated = pod(readinessGates=[{"conditionType": GATE}])

    closed = ready(gated, view(ready=True))
    gated["status"] = {"conditions": [{"type": GATE, "status": "False"}]}
    still_closed = ready(gated, view(ready=True))
    gated["status"] = {"conditions": [{"type": GATE, "status": "True"}]}

    assert closed == ("True", "False", f"condition {GATE} does not exist")
    assert still_closed == ("True", "False", f"condition {GATE} is False")
    assert ready(gated, view(ready=True)) == ("True", "True", None)
    assert ready(gated, view(ready=False)) == ("False", "False", "containers with unready status: ['engine']")


def test_a_condition_keeps_the_time_of_its_last_change() -> None:
    some = pod()
    where = Placement(address="10.244.1.2", host_address="10.244.1.1", start_s=0.0)
    some["status"] = pod_status(some, [view(ready=False)], where, now_s=1.0)

    times = {
        each["type"]: each["lastTransitionTime"]
        for each in pod_status(some, [view(ready=True)], where, now_s=2.0)["conditions"]
    }

    assert times["Initialized"] == "1970-01-01T00:00:01Z"
    assert times["Ready"] == times["ContainersReady"] == "1970-01-01T00:00:02Z"


@pytest.mark.parametrize(
    ("policy", "state", "terminating", "phase"),
    [
        ("Always", Waiting(reason="ContainerCreating"), False, "Pending"),
        ("Always", Running(started_s=0.0), False, "Running"),
        ("Always", Terminated(exit_code=0, started_s=0.0, finished_s=1.0), False, "Running"),
        ("Always", Terminated(exit_code=0, started_s=0.0, finished_s=1.0), True, "Succeeded"),
        ("Never", Terminated(exit_code=0, started_s=0.0, finished_s=1.0), False, "Succeeded"),
        ("Never", Terminated(exit_code=1, started_s=0.0, finished_s=1.0), False, "Failed"),
    ],
)
def test_phases(policy: str, state: State, terminating: bool, phase: str) -> None:
    some = pod(restartPolicy=policy)
    if terminating:
        some["metadata"]["deletionTimestamp"] = "2026-11-22T00:00:00Z"
    where = Placement(address="10.244.1.2", host_address="10.244.1.1", start_s=0.0)

    over = terminating or policy == "Never"
    assert pod_status(some, [view(state=state, over=over)], where, now_s=2.0)["phase"] == phase


def test_a_failed_container_that_starts_again_does_not_make_its_pod_fail() -> None:
    where = Placement(address="10.244.1.2", host_address="10.244.1.1", start_s=0.0)
    failed = Terminated(exit_code=1, started_s=0.0, finished_s=1.0)

    assert pod_status(pod(restartPolicy="OnFailure"), [view(state=failed)], where, now_s=2.0)["phase"] == "Running"


@pytest.mark.parametrize(
    ("exit_code", "over", "phase", "initialized"),
    [(0, True, "Running", "True"), (1, True, "Failed", "False"), (1, False, "Pending", "False")],
)
def test_init_containers_come_first(exit_code: int, over: bool, phase: str, initialized: str) -> None:
    where = Placement(address="10.244.1.2", host_address="10.244.1.1", start_s=0.0)
    initial = view(state=Terminated(exit_code=exit_code, started_s=0.0, finished_s=1.0), over=over)

    status = pod_status(pod(), [view()], where, now_s=2.0, init_containers=[initial])

    assert status["phase"] == phase
    assert {each["type"]: each["status"] for each in status["conditions"]}["Initialized"] == initialized
    assert status["initContainerStatuses"][0]["ready"] is (exit_code == 0)


async def test_a_crashed_container_starts_again_and_says_how_it_ended(tmp_path: Path) -> None:
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


async def test_a_failing_startup_probe_restarts_the_container(tmp_path: Path) -> None:
    probe = {"exec": {"command": ["false"]}, "failureThreshold": 1}
    async with running({"command": [*SHELL, FOREVER], "startupProbe": probe}, tmp_path) as container:
        await until(lambda: container.view.restarts == 1)

        assert not container.view.started


async def test_a_failing_liveness_probe_restarts_the_container(tmp_path: Path) -> None:
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
async def test_the_restart_policy_decides(policy: str, exit_code: int, again: bool, tmp_path: Path) -> None:
    spec = {"command": [*SHELL, f"exit {exit_code}"]}
    async with running(spec, tmp_path, policy=policy) as container:
        await until(lambda: isinstance(container.view.state, Terminated) or container.view.restarts > 0)

        if again:
            await until(lambda: container.view.restarts > 0)
        else:
            assert container.view.restarts == 0
            assert isinstance(container.view.state, Terminated)
            assert container.view.state.exit_code == exit_code


async def test_readiness_is_probed_while_the_container_ends(tmp_path: Path) -> None:
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


async def test_a_container_left_leaves_no_process_behind(tmp_path: Path) -> None:
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
    place = Place(address="127.0.0.1", host_address="127.0.0.1", node=node)
    whole = pod(restartPolicy=policy)
    engine = {"name": "engine", **spec}

    async def lookup(kind: str, name: str) -> Values:
        return None

    runtime = HostRuntime(whole, engine, place, lookup)
    container = ProcessContainer(whole, engine, place, runtime, on_change=ignored)
    life = asyncio.create_task(container.run())
    try:
        yield container
    finally:
        life.cancel()
        await asyncio.gather(life, return_exceptions=True)


def ignored() -> None:
    return


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits for its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def surroundings(*, log: Path = Path(os.devnull), **ports: int) -> Surroundings:
    async def execute(command: Sequence[str]) -> int:
        return await run(command, environment={"PATH": os.environ["PATH"]}, log=log)

    return Surroundings(address="127.0.0.1", ports=ports, execute=execute)


def fields() -> Field:
    return Field(pod=pod(), address="10.244.1.2", host_address="10.244.1.1")


def nothing(kind: str, name: str) -> Values:
    return None


def view(*, ready: bool = False, state: State | None = None, over: bool = False) -> ContainerView:
    return ContainerView(
        name="engine",
        image="",
        container_id="",
        state=Running(started_s=0.0) if state is None else state,
        last=None,
        restarts=0,
        started=True,
        ready=ready,
        over=over,
    )


def ready(some: Mapping[str, Any], container: ContainerView) -> tuple[str, str, str | None]:
    """Return ContainersReady, Ready and Ready's message."""
    where = Placement(address="10.244.1.2", host_address="10.244.1.1", start_s=0.0)
    conditions = {each["type"]: each for each in pod_status(some, [container], where, now_s=1.0)["conditions"]}
    return conditions["ContainersReady"]["status"], conditions["Ready"]["status"], conditions["Ready"]["message"]
