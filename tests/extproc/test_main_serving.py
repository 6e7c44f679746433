"""Tests ``dualmap router`` as a process: its ports, the effect of a changed pool file, and its end by a signal."""

import asyncio
import gc
import json
import os
import signal

import grpc
import grpc.aio
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

from dualmap_extproc.app import wiring
from dualmap_extproc.names import EDS_METHOD, EDS_SERVICE
from dualmap_extproc.settings import Settings
from dualmap_extproc.wire import discovery_pb2
from extproc.envoy_messages import NO_WAIT, chat, destination, refused_with, request_body, request_headers
from extproc.router_processes import WAIT_S, picked, pool_document, running, stream, write_pool
from extproc.tokenizer_files import write_tokenizer
from waiting import until

pytestmark = pytest.mark.usefixtures("transport")


async def test_router_with_two_pools_serves_all_ports_and_stops(tmp_path):
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


async def test_discovery_stream_gets_file_change_and_delays_no_shutdown(tmp_path):
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
        # The limit is far below the drain timeout, because a drain does not wait for discovery streams.
        assert await served.exited() == 0


def hosts(response: discovery_pb2.DiscoveryResponse) -> int:
    assignment = discovery_pb2.ClusterLoadAssignment.FromString(response.resources[0].value)
    return sum(len(locality.lb_endpoints) for locality in assignment.endpoints)


async def test_router_finishes_a_half_read_request_after_sigterm(tmp_path):
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


HANGING_FILES = """
import runpy, threading, time
from dualmap_extproc.tokens import sources
read = sources.version_of
def hang(*names):
    if threading.current_thread() is not threading.main_thread():
        print("hangs", flush=True)
        time.sleep(3600)
    return read(*names)
sources.version_of = hang
runpy.run_module("dualmap_cli", run_name="__main__")
"""


async def test_router_stops_although_its_tokenizer_is_not_read(tmp_path):
    document = pool_document()
    folder = write_tokenizer(tmp_path / "tokenizer")
    document["spec"]["engine"] = {"tokenizer": {"source": "Files", "path": str(folder)}}
    file = tmp_path / "pool.yaml"
    file.write_text(yaml.safe_dump(document))
    async with running(file, program=("-c", HANGING_FILES)) as served:
        assert await asyncio.wait_for(served.process.stdout.readline(), WAIT_S) == b"hangs\n"
        served.stop()
        assert await served.exited() == 0


async def test_router_bounds_its_stored_bodies_and_reads_large_ones(tmp_path):
    """The router's own processes read the large body; it exits although they run."""
    part = b'{"model": "m", "prompt": "'.ljust(600_000, b"x")
    async with (
        running(write_pool(tmp_path / "pool.yaml"), options=("--max-buffered", "1MB")) as served,
        grpc.aio.insecure_channel(served.grpc) as channel,
    ):
        call, beyond = stream(channel), stream(channel)
        await call.write(request_headers(NO_WAIT))
        await call.write(request_body(part, end=False))
        await until(lambda: served.buffered(600_000))
        await beyond.write(request_headers(NO_WAIT))
        await beyond.write(request_body(part, end=False))
        refused = await beyond.read()
        await call.write(request_body(b'"}'))
        picked = await call.read()
        await until(lambda: served.buffered(0))
        call.cancel()
        served.stop()

        assert refused_with([refused]) == 503
        assert destination(picked)
        assert await served.exited() == 0


async def test_router_counts_invalid_pool_change_and_keeps_last_pools(tmp_path):
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
        # The member answers 404 to the requests for its profile, which is another warning.
        while b"Rejected pool file, keeping the last valid version" not in await served.process.stderr.readline():
            pass
        page = await served.get("/metrics")
        assert b"dualmap_pool_refusals_total 1.0" in page
        assert b"dualmap_pool_file_refused 1.0" in page
        assert await picked(channel, chat())


async def test_router_applies_queue_deadlines_while_serving(tmp_path, monkeypatch):
    """The load of requests without a report must expire."""
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


async def test_router_drain_timeout_ends_an_open_stream(tmp_path):
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
        # This value is below the default of 25 s.
        assert await asyncio.wait_for(served.exited(), 20.0) == 0


async def test_router_self_signed_tls_covers_only_the_grpc_port(tmp_path):
    async with running(write_pool(tmp_path / "pool.yaml"), options=("--tls", "self-signed")) as served:
        assert await served.ready() == health_pb2.HealthCheckResponse.SERVING
        assert b"dualmap_" in await served.get("/metrics")
        async with grpc.aio.insecure_channel(served.grpc) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
        served.stop()
        assert await served.exited() == 0


async def test_router_stop_logs_open_requests_and_completion(tmp_path):
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

    draining, stopped = (line for line in said if line["logger"] == "dualmap_extproc.transport.server")
    assert (draining["event"], draining["open_requests"], draining["at_most_s"]) == ("Draining", 1, 0.6)
    assert (stopped["event"], stopped["cut_requests"]) == ("Stopped", 1)


def test_router_process_leaves_its_imports_out_of_collections(monkeypatch):
    seen = []

    async def serve(*_args, **_kwargs):
        seen.append(gc.get_freeze_count())

    monkeypatch.setattr(wiring, "serve", serve)
    try:
        assert wiring.run(Settings(replica_id="r")) == 0
    finally:
        gc.unfreeze()

    assert seen[0] > 0
