"""Tests ``dualmap router`` as a process: with an absent, late or hanging Redis, and with a shared Redis."""

import asyncio
import json

import grpc
import grpc.aio
import pytest
import yaml

from dualmap_extproc.names import SCALER_SERVICE
from dualmap_extproc.store.codec import decode_update
from dualmap_extproc.store.redis import loads_key
from dualmap_extproc.wire import external_scaler_pb2
from extproc.envoy_messages import NO_WAIT, chat, destination, request_body, request_headers
from extproc.router_processes import WAIT_S, Router, picked, pool_document, running, stream, write_pool
from redis_server import RedisServer, redis_server
from waiting import until

pytestmark = pytest.mark.usefixtures("transport")


async def store_is_up(served: Router) -> bool:
    return b"dualmap_store_up 1.0" in await served.get("/metrics")


async def test_router_without_redis_exports_no_store_metrics(tmp_path):
    async with running(write_pool(tmp_path / "pool.yaml")) as served:
        assert b"dualmap_store" not in await served.get("/metrics")


async def test_router_starts_before_redis_and_hides_its_password(tmp_path):
    redis = RedisServer(tmp_path / "redis", password="hidden-word")
    password = tmp_path / "password"
    password.write_text("hidden-word\n")
    # The URL has a different password, which the router must not use.
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
        written = served.before + await served.process.stderr.read()
    assert b'dualmap_store_errors_total{kind="connection"}' in page
    assert b"hidden" not in page + written
    lines = [line for line in map(json.loads, written.splitlines()) if line["logger"].endswith("store.exchange")]
    assert [line["event"].partition(",")[0] for line in lines] == [
        "Lost shared state",
        "Shared state recovered",
    ]
    assert lines[0]["store"] == redis.url
    # The stopped router's last update reports no load.
    assert decode_update(last[b"n"]).loads == {}


async def test_two_routers_share_loads_through_redis(tmp_path):
    file = write_pool(tmp_path / "pool.yaml")
    with redis_server(tmp_path / "redis") as redis:
        options = ("--redis", redis.url)
        async with running(file, options=options) as one, running(file, options=options) as other:
            for served in (one, other):

                async def knows(served: Router = served) -> bool:
                    return b'dualmap_pool_peers{pool="llm/qwen"} 1.0' in await served.get("/metrics")

                await until(knows)


async def test_queued_request_makes_the_pool_active_at_the_other_router(tmp_path):
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


async def test_hung_redis_does_not_delay_the_router_shutdown(tmp_path):
    with redis_server(tmp_path / "redis") as redis:
        async with running(write_pool(tmp_path / "pool.yaml"), options=("--redis", redis.unix_url)) as served:
            await until(lambda: store_is_up(served))
            redis.pause()
            try:
                served.stop()
                assert await served.exited() == 0
            finally:
                redis.resume()
