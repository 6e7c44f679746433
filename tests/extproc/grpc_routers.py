"""A router's gRPC ports with a real client, also with a busy engine, for tests."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from dualmap_extproc.names import EXT_PROC_METHOD, EXT_PROC_SERVICE
from dualmap_extproc.request.picker import Picker
from dualmap_extproc.request.reading import Reader
from dualmap_extproc.settings import Limits
from dualmap_extproc.transport.processor import ExternalProcessor
from dualmap_extproc.transport.server import GrpcServers, Ports
from dualmap_extproc.wire import ext_proc_pb2 as wire
from extproc.envoy_messages import NO_WAIT, Recorder, chat, crowded_pool, pool, request_body, request_headers
from extproc.transports import selected
from waiting import until

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
UNLIMITED = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


@dataclass
class Running:
    """A router's gRPC servers on free ports, with a client."""

    picker: Picker
    observer: Recorder
    processor: ExternalProcessor
    servers: GrpcServers
    ports: Ports
    channel: grpc.aio.Channel

    def stream(self, channel: grpc.aio.Channel | None = None):
        method = (channel or self.channel).stream_stream(
            f"/{EXT_PROC_SERVICE}/{EXT_PROC_METHOD}",
            request_serializer=wire.ProcessingRequest.SerializeToString,
            response_deserializer=wire.ProcessingResponse.FromString,
        )
        return method()

    @property
    def in_flight(self) -> int:
        return sum(each.in_flight for status in self.picker.statuses() for each in status.endpoints)

    @property
    def held(self) -> int:
        return sum(status.held for status in self.picker.statuses())

    async def health(self, service: str) -> int:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self.ports.health}") as channel:
            answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
        return answer.status


@asynccontextmanager
async def running(*, ready=True, limits: Limits | None = None, reader: Reader | None = None) -> AsyncIterator[Running]:
    observer = Recorder()
    limits = limits or Limits()
    picker = Picker(limits, observer.report, id_prefix="r")
    picker.set_pools(0.0, (pool(),))
    processor = ExternalProcessor(picker, observer.report, limits, reader)
    servers = GrpcServers(processor, services=(), access_log=(), limits=limits, transport=selected())
    ports = await servers.start("127.0.0.1", grpc_port=0, health_port=0, als_port=0, certificates=None)
    if ready:
        await servers.ready()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{ports.grpc}", options=UNLIMITED) as channel:
        try:
            yield Running(picker, observer, processor, servers, ports, channel)
        finally:
            await servers.drain(0.0)


@pytest.fixture
async def router() -> AsyncIterator[Running]:
    async with running() as router:
        yield router


async def answers(call, count: int) -> list[wire.ProcessingResponse]:
    return [await call.read() for _ in range(count)]


@asynccontextmanager
async def crowded(**queue) -> AsyncIterator[tuple[Running, grpc.aio.StreamStreamCall]]:
    """A router with a single busy engine, and the call that keeps the engine busy."""
    async with running() as router:
        router.picker.set_pools(0.0, (crowded_pool(**queue),))
        call = router.stream()
        await call.write(request_headers(NO_WAIT))
        await call.write(request_body(chat("long " * 10_000)))
        await answers(call, 2)
        yield router, call


async def held(router: Running, config=NO_WAIT, *, already=0) -> grpc.aio.StreamStreamCall:
    """Send a request, wait until the router has queued it, and return its call."""
    call = router.stream()
    await call.write(request_headers(config))
    await call.write(request_body(chat()))
    await until(lambda: router.held > already)
    return call
