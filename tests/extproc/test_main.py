"""``dualmap router`` as a process: its ready line, what its ports serve, reload, signals and exit codes."""

import asyncio
import json
import os
import re
import signal
import socket
import sys
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio
import pytest
import yaml
from click.testing import CliRunner
from grpc_health.v1 import health_pb2, health_pb2_grpc

from dualmap_extproc import wiring
from dualmap_extproc.main import router
from dualmap_extproc.names import EDS_METHOD, EDS_SERVICE, EXT_PROC_METHOD, EXT_PROC_SERVICE, SCALER_SERVICE
from dualmap_extproc.settings import Settings
from dualmap_extproc.store.codec import decode_news
from dualmap_extproc.store.redis import loads_key
from dualmap_extproc.wire import discovery_pb2, external_scaler_pb2
from dualmap_extproc.wire import ext_proc_pb2 as wire
from extproc.envoy_messages import NO_WAIT, chat, destination, logging_as_it_was, request_body, request_headers
from kube_api import KubeApi, kube_api, pool_body
from redis_server import RedisServer, redis_server
from waiting import until

WAIT_S = 60.0
READY = re.compile(r"dualmap router ready grpc=(\S+) health=(\S+) metrics=(\S+) als=(\S+)$")


def pool_document(name="qwen", *, model="m", members=2) -> dict[str, object]:
    ring = [{"id": f"{name}-{n}", "address": f"10.0.0.{n}", "port": 8000} for n in range(members)]
    return {
        "apiVersion": "serving.dualmap.dev/v1alpha1",
        "kind": "InferencePool",
        "metadata": {"name": name, "namespace": "llm"},
        "spec": {"model": {"name": model}},
        "status": {"ring": {"version": members, "members": ring}},
    }


def write_pool(path: Path, *args, **kwargs) -> Path:
    path.write_text(yaml.safe_dump(pool_document(*args, **kwargs)))
    return path


@dataclass
class Router:
    """A running ``dualmap router`` and where its ports are."""

    process: asyncio.subprocess.Process
    grpc: str
    health: str
    metrics: str
    als: str

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    async def exited(self) -> int:
        return await asyncio.wait_for(self.process.wait(), WAIT_S)

    async def get(self, path: str) -> bytes:
        def fetch() -> bytes:
            with urllib.request.urlopen(f"http://{self.metrics}{path}", timeout=10) as response:
                content: bytes = response.read()
            return content

        return await asyncio.to_thread(fetch)

    async def ready(self) -> int:
        async with grpc.aio.insecure_channel(self.health) as channel:
            request = health_pb2.HealthCheckRequest(service="readiness")
            return (await health_pb2_grpc.HealthStub(channel).Check(request)).status


async def launch(*arguments: str, **environment: str) -> asyncio.subprocess.Process:
    command = [sys.executable, "-m", "dualmap_cli", "router", *arguments]
    environment = {**os.environ, "GRPC_VERBOSITY": "NONE", **environment}
    return await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE, env=environment)


@asynccontextmanager
async def running(*pools: Path, options: tuple[str, ...] = ()) -> AsyncIterator[Router]:
    ports = [text for port in ("grpc", "health", "metrics", "als") for text in (f"--{port}-port", "0")]
    files = [text for path in pools for text in ("--pool", str(path))]
    process = await launch("--host", "127.0.0.1", *ports, *files, *options)
    try:
        assert process.stderr is not None
        line = (await asyncio.wait_for(process.stderr.readline(), WAIT_S)).decode().strip()
        match = READY.match(line)
        assert match, line
        yield Router(process, *match.groups())
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def stream(channel: grpc.aio.Channel):
    return channel.stream_stream(
        f"/{EXT_PROC_SERVICE}/{EXT_PROC_METHOD}",
        request_serializer=wire.ProcessingRequest.SerializeToString,
        response_deserializer=wire.ProcessingResponse.FromString,
    )()


async def picked(channel: grpc.aio.Channel, body: bytes) -> str | None:
    call = stream(channel)
    await call.write(request_headers(NO_WAIT))
    await call.write(request_body(body))
    answer = await call.read()
    call.cancel()
    return destination(answer)


async def test_a_router_of_two_pools_serves_all_its_ports_and_stops_at_once_when_idle(tmp_path):
    files = write_pool(tmp_path / "a.yaml", "a", model="a"), write_pool(tmp_path / "b.yaml", "b", model="b", members=3)
    async with running(*files) as served:
        async with grpc.aio.insecure_channel(served.grpc) as channel:
            assert await picked(channel, chat(model="a"))
            assert await picked(channel, chat(model="b"))
        assert await served.ready() == health_pb2.HealthCheckResponse.SERVING
        pool = json.loads(await served.get("/pools/llm/b"))
        assert pool["ring_version"] == 3
        assert [each["id"] for each in pool["endpoints"]] == ["b-0", "b-1", "b-2"]
        assert b'dualmap_requests_total{endpoint="b-' in await served.get("/metrics")
        served.stop()
        assert await served.exited() == 0


async def test_an_open_discovery_stream_learns_of_a_changed_file_and_does_not_delay_the_stop(tmp_path):
    file = write_pool(tmp_path / "pool.yaml", members=2)
    async with (
        running(file, options=("--drain-timeout", "600s")) as served,
        grpc.aio.insecure_channel(served.grpc) as channel,
    ):
        endpoints = channel.stream_stream(
            f"/{EDS_SERVICE}/{EDS_METHOD}",
            request_serializer=discovery_pb2.DiscoveryRequest.SerializeToString,
            response_deserializer=discovery_pb2.DiscoveryResponse.FromString,
        )()
        await endpoints.write(discovery_pb2.DiscoveryRequest(resource_names=["llm/qwen"]))
        assert hosts(await endpoints.read()) == 2
        write_pool(tmp_path / "new.yaml", members=5).rename(file)
        assert hosts(await endpoints.read()) == 5
        assert json.loads(await served.get("/pools/llm/qwen"))["ring_version"] == 5

        served.stop()
        # Far below the drain timeout: discovery is no work to wait for.
        assert await served.exited() == 0


def hosts(response: discovery_pb2.DiscoveryResponse) -> int:
    assignment = discovery_pb2.ClusterLoadAssignment.FromString(response.resources[0].value)
    return sum(len(locality.lb_endpoints) for locality in assignment.endpoints)


async def test_a_half_read_request_gets_its_pick_after_sigterm(tmp_path):
    async with (
        running(write_pool(tmp_path / "pool.yaml")) as served,
        grpc.aio.insecure_channel(served.grpc) as channel,
    ):
        call = stream(channel)
        await call.write(request_headers(NO_WAIT))
        await call.write(request_body(chat()[:9], end=False))
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service="readiness"))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING

        served.stop()
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert await served.ready() == health_pb2.HealthCheckResponse.NOT_SERVING
        await call.write(request_body(chat()[9:]))
        assert destination(await call.read())
        await call.done_writing()
        assert await served.exited() == 0


async def test_a_refused_change_is_counted_and_the_last_good_pools_serve_on(tmp_path):
    file = write_pool(tmp_path / "pool.yaml")
    async with (
        running(file) as served,
        grpc.aio.insecure_channel(served.grpc) as channel,
        asyncio.timeout(WAIT_S),
    ):
        assert b"dualmap_pool_refusals_total 0.0" in await served.get("/metrics")
        (tmp_path / "new.yaml").write_text("replicas: !!bool maybe")
        (tmp_path / "new.yaml").rename(file)
        assert served.process.stderr is not None
        assert b"refused" in await served.process.stderr.readline()
        page = await served.get("/metrics")
        assert b"dualmap_pool_refusals_total 1.0" in page
        assert b"dualmap_pool_file_refused 1.0" in page
        assert await picked(channel, chat())


async def test_deadlines_are_kept_while_it_serves(tmp_path, monkeypatch):
    """Else requests of which nothing is heard would stay in the books for ever."""
    kept: asyncio.Queue[object] = asyncio.Queue()

    async def keep(picker: object) -> None:
        kept.put_nowait(picker)
        await asyncio.Event().wait()

    monkeypatch.setattr(wiring, "keep_deadlines", keep)
    ports = {"grpc_port": 0, "health_port": 0, "metrics_port": 0, "als_port": 0}
    settings = Settings(
        pools=(write_pool(tmp_path / "pool.yaml"),), host="127.0.0.1", replica_id="r", drain_timeout_s=0.0, **ports
    )
    serving = asyncio.create_task(wiring.serve(settings))

    assert await asyncio.wait_for(kept.get(), WAIT_S)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(serving, WAIT_S)


async def test_the_drain_timeout_ends_the_wait_for_a_stream_that_stays(tmp_path):
    options = ("--drain-timeout", "600ms")
    async with (
        running(write_pool(tmp_path / "pool.yaml"), options=options) as served,
        grpc.aio.insecure_channel(served.grpc) as channel,
    ):
        call = stream(channel)
        await call.write(request_headers(NO_WAIT))
        await call.write(request_body(chat()))
        await call.read()

        served.stop()
        # Below the default, which is 25 s.
        assert await asyncio.wait_for(served.exited(), 20.0) == 0


async def test_self_signed_covers_the_grpc_port_and_leaves_health_and_metrics_plain(tmp_path):
    async with running(write_pool(tmp_path / "pool.yaml"), options=("--tls", "self-signed")) as served:
        assert await served.ready() == health_pb2.HealthCheckResponse.SERVING
        assert b"dualmap_" in await served.get("/metrics")
        async with grpc.aio.insecure_channel(served.grpc) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
        served.stop()
        assert await served.exited() == 0


@pytest.mark.parametrize(
    ("content", "options", "status", "said"),
    [
        ("", (), 2, "pool.yaml"),
        ("kind: Pod", (), 2, "apiVersion"),
        (None, ("--tls", "/nonexistent"), 2, "--tls: '/nonexistent' is not accepted; give off, self-signed"),
        (None, ("--tls", "on"), 2, "--tls: 'on' is not accepted; give off, self-signed"),
        ("replicas: !!bool maybe", (), 2, "pool.yaml"),
        (None, ("--drain-timeout", "soon"), 2, "Invalid value for '--drain-timeout': 'soon' is not accepted; give "),
        (None, ("--replica-id", ""), 2, "Invalid value for '--replica-id': '' is not accepted; give 1 to 253 ASCII"),
        (None, ("--replica-id", "r" * 254), 2, "1 to 253 ASCII characters, no spaces"),
        (None, ("--replica-id", "a b"), 2, "'a b' is not accepted; give 1 to 253 ASCII characters, no spaces"),
        (None, ("--replica-id", "ro\x00ter"), 2, "1 to 253 ASCII characters, no spaces"),
        (None, ("--als-port", "4711", "--grpc-port", "4711"), 2, "--grpc-port and --als-port are both 4711"),
        (None, ("--redis", "redis://cache:port"), 2, "--redis: the URL is not accepted: it is no URL, or its port"),
        (None, ("--redis", "rediss://c", "--redis-ca", "/nonexistent"), 2, "--redis-ca: /nonexistent: No such file"),
        (None, ("--redis", "redis://c", "--redis-password-file", "/nonexistent"), 2, "/nonexistent: No such file"),
        (None, ("--redis-password-file", "/nonexistent"), 2, "--redis-password-file means nothing without --redis"),
        (None, ("--redis", "redis://c", "--redis-password", "x"), 2, "give --redis-password-file FILE, or DUALMAP_"),
        (None, ("--tls-client-ca", "/nonexistent"), 2, "--tls-client-ca: means nothing in plain text"),
        (None, ("--log-prompts",), 2, "--log-prompts means nothing without --log-level debug"),
        (None, ("--grpc-port", "70000"), 2, "70000"),
        (None, ("--host", "not.an.address.invalid"), 1, "give another --host"),
        (None, ("--host", "a..b"), 1, "give another --host"),
        (None, ("--host", "192.0.2.1"), 1, "cannot listen on 192.0.2.1:0"),
    ],
)
def test_what_keeps_it_from_starting_is_said_and_has_an_exit_status(tmp_path, content, options, status, said):
    file = write_pool(tmp_path / "pool.yaml")
    if content is not None:
        file.write_text(content)
    ports = ("--host", "127.0.0.1", "--grpc-port", "0", "--health-port", "0", "--metrics-port", "0", "--als-port", "0")

    with logging_as_it_was():
        result = CliRunner().invoke(router, ["--pool", str(file), *ports, *options])

    assert result.exit_code == status
    assert said in result.stderr
    assert isinstance(result.exception, SystemExit)


@pytest.mark.parametrize("option", ["--grpc-port", "--health-port", "--metrics-port", "--als-port"])
async def test_a_port_in_use_is_said_in_one_line_that_names_its_option(tmp_path, monkeypatch, option):
    # As at a user's: gRPC may say what it wants.
    monkeypatch.delenv("GRPC_VERBOSITY", raising=False)
    ports = {f"--{name}-port": "0" for name in ("grpc", "health", "metrics", "als")}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports[option] = str(taken.getsockname()[1])
        arguments = [text for pair in ports.items() for text in pair]
        file = write_pool(tmp_path / "pool.yaml")
        command = [
            sys.executable,
            "-m",
            "dualmap_cli",
            "router",
            "--host",
            "127.0.0.1",
            "--pool",
            str(file),
            *arguments,
        ]
        process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
        _, said = await asyncio.wait_for(process.communicate(), WAIT_S)

    where = f"127.0.0.1:{ports[option]}"
    assert said.decode() == (
        f"dualmap router: cannot listen on {where}: Address already in use; give another {option}\n"
    )
    assert process.returncode == 1


async def test_a_stop_says_what_it_waits_for_how_long_and_that_it_is_over(tmp_path):
    options = ("--drain-timeout", "600ms", "--log-format", "json")
    async with (
        running(write_pool(tmp_path / "pool.yaml"), options=options) as served,
        grpc.aio.insecure_channel(served.grpc) as channel,
    ):
        call = stream(channel)
        await call.write(request_headers(NO_WAIT))
        await call.write(request_body(chat()))
        await call.read()
        served.stop()
        assert served.process.stderr is not None
        said = [
            json.loads(line) for line in (await asyncio.wait_for(served.process.stderr.read(), WAIT_S)).splitlines()
        ]

    draining, stopped = (line for line in said if line["logger"] == "dualmap_extproc.server")
    assert (draining["event"], draining["open_requests"], draining["at_most_s"]) == ("draining", 1, 0.6)
    assert (stopped["event"], stopped["cut_requests"]) == ("stopped", 1)


async def store_is_up(served: Router) -> bool:
    return b"dualmap_store_up 1.0" in await served.get("/metrics")


async def test_without_redis_nothing_is_said_of_a_store(tmp_path):
    async with running(write_pool(tmp_path / "pool.yaml")) as served:
        assert b"dualmap_store" not in await served.get("/metrics")


async def test_redis_may_come_later_and_the_password_is_seen_nowhere(tmp_path):
    redis = RedisServer(tmp_path / "redis", password="hidden-word")
    password = tmp_path / "password"
    password.write_text("hidden-word\n")
    # That of the URL is another, and is not used.
    url = redis.url.replace("redis://", "redis://:hidden-too@")
    options = ("--redis", url, "--redis-password-file", str(password), "--log-format", "json", "--log-level", "debug")
    async with running(write_pool(tmp_path / "pool.yaml"), options=options) as served:
        async with grpc.aio.insecure_channel(served.grpc) as channel:
            assert await picked(channel, chat())
            assert not await store_is_up(served)
            redis.start()
            try:
                await until(lambda: store_is_up(served))
                assert await picked(channel, chat())
                page = await served.get("/metrics")
                served.stop()
                assert await served.exited() == 0
                with redis.admin as admin:
                    (_, last), *_ = admin.xrevrange(loads_key("llm/qwen"), count=1)
            finally:
                redis.kill()
        assert served.process.stderr is not None
        written = await served.process.stderr.read()
    assert b'dualmap_store_errors_total{kind="connection"}' in page
    assert b"hidden" not in page + written
    lines = [line for line in map(json.loads, written.splitlines()) if line["logger"].endswith("store.exchange")]
    assert [line["event"].partition(",")[0] for line in lines] == [
        "shared state is out of reach",
        "shared state is back",
    ]
    assert lines[0]["store"] == redis.url
    # Its last word is that it has no load any more.
    assert decode_news(last[b"n"]).loads == {}


async def test_two_routers_know_of_each_other(tmp_path):
    file = write_pool(tmp_path / "pool.yaml")
    with redis_server(tmp_path / "redis") as redis:
        options = ("--redis", redis.url)
        async with running(file, options=options) as one, running(file, options=options) as other:
            for served in (one, other):

                async def knows(served: Router = served) -> bool:
                    return b'dualmap_pool_peers{pool="llm/qwen"} 1.0' in await served.get("/metrics")

                await until(knows)


async def test_a_request_at_one_router_wakes_the_pool_at_the_other_which_says_goodbye_when_it_ends(tmp_path):
    document = pool_document(members=0)
    document["spec"] |= {"routing": {"queue": {"holdWhenEmpty": True}}}
    file = tmp_path / "pool.yaml"
    file.write_text(yaml.safe_dump(document))
    with redis_server(tmp_path / "redis") as redis:
        options = ("--redis", redis.url)
        async with (
            running(file, options=options) as one,
            running(file, options=options) as other,
            grpc.aio.insecure_channel(one.grpc) as asked,
            grpc.aio.insecure_channel(other.grpc) as watched,
        ):
            active = watched.unary_stream(
                f"/{SCALER_SERVICE}/StreamIsActive",
                request_serializer=external_scaler_pb2.ScaledObjectRef.SerializeToString,
                response_deserializer=external_scaler_pb2.IsActiveResponse.FromString,
            )(external_scaler_pb2.ScaledObjectRef(namespace="llm", scaler_metadata={"pool": "qwen"}))
            assert not (await asyncio.wait_for(active.read(), WAIT_S)).result

            call = stream(asked)
            await call.write(request_headers(NO_WAIT))
            await call.write(request_body(chat()))

            assert (await asyncio.wait_for(active.read(), WAIT_S)).result
            other.stop()
            assert await asyncio.wait_for(active.read(), WAIT_S) is grpc.aio.EOF
            assert await active.code() is grpc.StatusCode.OK
            assert await other.exited() == 0
            file.write_text(yaml.safe_dump(document | {"status": pool_document(members=1)["status"]}))
            assert destination(await asyncio.wait_for(call.read(), WAIT_S)) == "10.0.0.0:8000"


async def test_a_redis_that_hangs_does_not_keep_a_router_from_ending(tmp_path):
    with redis_server(tmp_path / "redis") as redis:
        async with running(write_pool(tmp_path / "pool.yaml"), options=("--redis", redis.unix_url)) as served:
            await until(lambda: store_is_up(served))
            redis.pause()
            try:
                served.stop()
                assert await served.exited() == 0
            finally:
                redis.resume()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "no pools; give --pool FILE, once or more, or --kube"),
        (("--kube", "--pool", "pool.yaml"), "--pool and --kube exclude each other"),
        (("--kube", "--namespace", "a", "--all-namespaces"), "--namespace and --all-namespaces exclude each other"),
        (("--pool", "pool.yaml", "--namespace", "a"), "--namespace means nothing without --kube"),
        (("--pool", "pool.yaml", "--all-namespaces"), "--all-namespaces means nothing without --kube"),
        (("--kube", "--namespace", "A/b"), "'A/b' is not accepted; give a DNS label of at most 63 characters"),
    ],
)
def test_where_pools_come_from_is_said_once(options, said):
    result = CliRunner().invoke(router, options)

    assert result.exit_code == 2
    assert said in result.stderr


async def test_a_kubeconfig_that_cannot_be_used_is_said_and_has_an_exit_status(tmp_path):
    process = await launch("--kube", KUBECONFIG=str(tmp_path / "none"))
    _, said = await asyncio.wait_for(process.communicate(), WAIT_S)

    assert process.returncode == 2
    assert f"dualmap router: kubeconfig {tmp_path / 'none'} does not exist".encode() in said


@asynccontextmanager
async def on_kubernetes(api: KubeApi, *options: str) -> AsyncIterator[asyncio.subprocess.Process]:
    ports = [text for port in ("grpc", "health", "metrics", "als") for text in (f"--{port}-port", "0")]
    process = await launch("--kube", "--host", "127.0.0.1", *ports, *options, KUBECONFIG=str(api.kubeconfig))
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def line_with(process: asyncio.subprocess.Process, words: str) -> str:
    """Return the next line on stderr that has these words."""
    assert process.stderr is not None
    async with asyncio.timeout(WAIT_S):
        while line := (await process.stderr.readline()).decode().rstrip():
            if words in line:
                return line
    raise AssertionError(f"it ended without saying {words!r}")


async def test_pools_of_a_kubernetes_api_are_routed_to_once_it_has_told_of_them(tmp_path):
    async with kube_api(tmp_path) as api:
        await api.put(pool_body("qwen", version=3, model="m"))
        api.hold_lists()
        async with on_kubernetes(api, "--namespace", "llm") as process:
            await line_with(process, "waiting for the pools of the Kubernetes API")
            await until(lambda: len(api.lists) > 0)
            api.answer_lists()
            match = READY.match(await line_with(process, "ready grpc="))
            assert match
            served = Router(process, *match.groups())
            assert await served.ready() == health_pb2.HealthCheckResponse.SERVING
            async with grpc.aio.insecure_channel(served.grpc) as channel:
                assert await picked(channel, chat())
            assert json.loads(await served.get("/pools/llm/qwen"))["ring_version"] == 3
            assert b'dualmap_kube_watch_age_seconds{resource="inferencepools"}' in await served.get("/metrics")
            served.stop()
            assert await served.exited() == 0


async def test_a_router_that_waits_for_the_api_server_can_be_stopped_and_never_says_ready(tmp_path):
    async with kube_api(tmp_path) as api:
        await api.stop()
        async with on_kubernetes(api, "--drain-timeout", "1s") as process:
            assert "ready" not in await line_with(process, "the Kubernetes API cannot be read")
            process.send_signal(signal.SIGTERM)
            assert process.stderr is not None
            said = await asyncio.wait_for(process.stderr.read(), WAIT_S)
            assert await asyncio.wait_for(process.wait(), WAIT_S) == 0
            assert b"router ready" not in said
