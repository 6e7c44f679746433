import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import pytest

from dualmap.pools.pool import Member, Queue, Routing
from dualmap_extproc.envoy.discovery.service import Discovery
from dualmap_extproc.names import (
    ADS_METHOD,
    ADS_SERVICE,
    CLUSTER_TYPE,
    EDS_METHOD,
    EDS_SERVICE,
    LONGEST_WAIT_KEY,
    ONLY_POOL,
)
from dualmap_extproc.wire import discovery_pb2
from extproc.discovery_messages import LLAMA, QWEN, answer_to, hosts, pool, request
from extproc.transports import serving
from waiting import WAIT_S, until

METHOD = f"/{EDS_SERVICE}/{EDS_METHOD}"


class Counts:
    def __init__(self) -> None:
        self.streams: asyncio.Queue[int] = asyncio.Queue()
        self.pushed = self.rejected = 0

    def discovery_streams(self, count: int) -> None:
        self.streams.put_nowait(count)

    def discovery_pushed(self) -> None:
        self.pushed += 1

    def discovery_rejected(self) -> None:
        self.rejected += 1

    async def until_streams(self, count: int) -> None:
        while await asyncio.wait_for(self.streams.get(), WAIT_S) != count:
            pass


Call = grpc.aio.StreamStreamCall[discovery_pb2.DiscoveryRequest, discovery_pb2.DiscoveryResponse]


class Service:
    """A discovery service on its own port, with Envoys as clients."""

    def __init__(self) -> None:
        self.counts = Counts()
        self.discovery = Discovery(self.counts)
        self.port = 0

    @asynccontextmanager
    async def started(self) -> AsyncIterator["Service"]:
        async with serving(self.discovery.handlers()) as self.port:
            yield self

    @asynccontextmanager
    async def envoy(self) -> AsyncIterator[Callable[[], Call]]:
        # Every Envoy has its own connection, so this channel must not share a connection.
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self.port}", options=options) as channel:
            method = channel.stream_stream(
                METHOD,
                request_serializer=discovery_pb2.DiscoveryRequest.SerializeToString,
                response_deserializer=discovery_pb2.DiscoveryResponse.FromString,
            )
            yield lambda: method(None)


async def receive(call: Call) -> discovery_pb2.DiscoveryResponse:
    response = await asyncio.wait_for(call.read(), WAIT_S)
    assert isinstance(response, discovery_pb2.DiscoveryResponse)
    return response


async def status_of(call: Call) -> grpc.StatusCode:
    return await asyncio.wait_for(call.code(), WAIT_S)


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    async with Service().started() as started:
        yield started


@pytest.mark.usefixtures("transport")
class TestEndpointDiscovery:
    async def test_discovery_before_first_publish_sends_no_response(self, service: Service) -> None:
        async with service.envoy() as opened:
            call = opened()
            await call.write(request(QWEN))
            await service.counts.until_streams(1)
            reading = asyncio.create_task(receive(call))
            await asyncio.sleep(0.05)
            assert not reading.done()
            service.discovery.publish([pool(count=1)])
            assert hosts(await reading) == {QWEN: ["10.0.0.1:8000"]}

    async def test_discovery_sends_a_change_to_every_envoy_once(self, service: Service) -> None:
        service.discovery.publish([pool(count=1)])
        async with service.envoy() as one, service.envoy() as two:
            calls = [one(), two(), two()]
            for call in calls:
                await call.write(request(QWEN))
                response = await receive(call)
                await call.write(request(QWEN, nonce=response.nonce, version=response.version_info))
            service.discovery.publish([pool(count=1)])
            service.discovery.publish([pool(count=2)])
            for call in calls:
                assert hosts(await receive(call)) == {QWEN: ["10.0.0.1:8000", "10.0.0.2:8000"]}
            await until(lambda: service.counts.pushed == 6)

    async def test_discovery_slow_envoy_gets_latest_and_delays_no_other(self, service: Service) -> None:
        """The slow Envoy's flow-control window fills with responses that it does not read."""
        big = pool(count=0)
        members = tuple(Member(id=f"m-{n}", address=f"10.1.{n // 250}.{n % 250}", port=8000) for n in range(2000))
        async with service.envoy() as slow, service.envoy() as quick:
            stuck, call = slow(), quick()
            await stuck.write(request(QWEN))
            await call.write(request(QWEN))
            last = 0
            for round_number in range(100):
                last = 2000 - round_number
                service.discovery.publish([replace(big, members=members[:last])])
                assert len(hosts(await receive(call))[QWEN]) == last
            # The slow Envoy receives no intermediate versions, but the last version.
            seen: list[int] = []
            while not seen or seen[-1] != last:
                seen.append(len(hosts(await receive(stuck))[QWEN]))
            assert len(seen) < 100

    async def test_discovery_aborted_stream_is_removed(
        self, service: Service, caplog: pytest.LogCaptureFixture
    ) -> None:
        service.discovery.publish([pool()])
        async with service.envoy() as opened, service.envoy() as other:
            staying = other()
            await staying.write(request(QWEN))
            await receive(staying)
            for _ in range(5):
                call = opened()
                await call.write(request(QWEN))
                await receive(call)
                call.cancel()
                await service.counts.until_streams(1)
            service.discovery.publish([pool(count=5)])
            assert len(hosts(await receive(staying))[QWEN]) == 5
        await service.counts.until_streams(0)
        assert not service.discovery._streams
        assert not caplog.records

    async def test_discovery_finished_stream_ends_with_ok(self, service: Service) -> None:
        service.discovery.publish([pool()])
        async with service.envoy() as opened:
            call = opened()
            await call.write(request(QWEN))
            await receive(call)
            await call.done_writing()
            assert await status_of(call) is grpc.StatusCode.OK

    async def test_discovery_rejection_is_counted_and_logged_once(
        self, service: Service, caplog: pytest.LogCaptureFixture
    ) -> None:
        service.discovery.publish([pool(count=1)])
        async with service.envoy() as opened:
            call = opened()
            await call.write(request(QWEN))
            response = await receive(call)
            await call.write(request(QWEN, nonce=response.nonce, version="before", error="malformed"))
            # Envoy's next response is the next change; the service does not repeat the rejected response.
            await call.write(request(QWEN, nonce=response.nonce, version="before"))
            await until(lambda: service.counts.rejected == 1)
            service.discovery.publish([pool(count=2)])
            assert len(hosts(await receive(call))[QWEN]) == 2
        assert service.counts.rejected == 1
        (record,) = caplog.records
        assert record.__dict__["details"] == {
            "envoy": "envoy-1",
            "what": "ClusterLoadAssignment",
            "accepted_version": "before",
            "reason": "malformed",
        }

    async def test_discovery_unknown_type_ends_the_stream_with_a_reason(self, service: Service) -> None:
        async with service.envoy() as opened:
            call = opened()
            await call.write(discovery_pb2.DiscoveryRequest(type_url="type.googleapis.com/other"))
            assert await status_of(call) is grpc.StatusCode.INVALID_ARGUMENT
            assert "ClusterLoadAssignment" in (await call.details() or "")
        await service.counts.until_streams(0)

    async def test_discovery_invalid_bytes_end_only_their_stream(self, service: Service) -> None:
        service.discovery.publish([pool()])
        async with service.envoy() as opened:
            good = opened()
            await good.write(request(QWEN))
            await receive(good)
            async with grpc.aio.insecure_channel(f"127.0.0.1:{service.port}") as channel:
                raw = channel.stream_stream(METHOD, bytes, bytes)(None)
                await raw.write(b"\xff\xff\xff")
                assert await status_of(raw) is not grpc.StatusCode.OK
            service.discovery.publish([pool(count=3)])
            assert len(hosts(await receive(good))[QWEN]) == 3


@pytest.mark.usefixtures("transport")
class TestAggregatedDiscovery:
    """Clusters and endpoints on one stream, requested by an Envoy without any pool."""

    @pytest.fixture
    async def ads(self, service: Service) -> AsyncIterator[Call]:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{service.port}") as channel:
            yield channel.stream_stream(
                f"/{ADS_SERVICE}/{ADS_METHOD}",
                request_serializer=discovery_pb2.DiscoveryRequest.SerializeToString,
                response_deserializer=discovery_pb2.DiscoveryResponse.FromString,
            )(None)

    async def test_ads_sends_added_and_removed_pools(self, service: Service, ads: Call) -> None:
        service.discovery.publish([pool("qwen")])
        await ads.write(request(of=CLUSTER_TYPE))
        response = await receive(ads)
        assert clusters(response) == {QWEN}
        await ads.write(answer_to(response))
        service.discovery.publish([pool("qwen"), pool("llama")])
        response = await receive(ads)
        assert clusters(response) == {QWEN, LLAMA}
        await ads.write(answer_to(response))
        service.discovery.publish([pool("qwen", 7), pool("llama")])
        service.discovery.publish([])
        assert clusters(await receive(ads)) == set()
        await until(lambda: service.counts.pushed == 3)

    async def test_ads_requests_without_pick_go_to_the_only_pool(self, service: Service, ads: Call) -> None:
        await ads.write(request(ONLY_POOL))
        for pools, count in ([pool("qwen", 3)], 3), ([pool("qwen", 3), pool("llama")], 0), ([pool("llama", 2)], 2):
            service.discovery.publish(pools)
            response = await receive(ads)
            assert {name: len(members) for name, members in hosts(response).items()} == {ONLY_POOL: count}
            await ads.write(answer_to(response, ONLY_POOL))

    async def test_ads_warns_once_per_pool_with_too_long_max_wait(
        self, service: Service, ads: Call, caplog: pytest.LogCaptureFixture
    ) -> None:
        patient = pool("llama", routing=Routing(queue=Queue(max_wait_s=31.0)))
        service.discovery.publish([pool("qwen"), patient])
        asked = request(of=CLUSTER_TYPE)
        asked.node.metadata[LONGEST_WAIT_KEY] = "30.0"
        await ads.write(asked)
        await receive(ads)
        service.discovery.publish([pool("qwen", 3), patient])
        (record,) = caplog.records
        assert record.__dict__["details"] == {
            "pool": LLAMA,
            "max_wait_s": 31.0,
            "longest_wait_s": 30.0,
            "envoy": "envoy-1",
        }


def clusters(response: discovery_pb2.DiscoveryResponse) -> set[str]:
    """Return the names of the clusters in a response."""
    assert {each.type_url for each in response.resources} <= {CLUSTER_TYPE}
    assert response.type_url == CLUSTER_TYPE
    return {discovery_pb2.Cluster.FromString(each.value).name for each in response.resources}


def test_router_does_not_import_envoys_types() -> None:
    """The import takes more than a second of CPU time; Envoy waits for its first clusters for 5 s only."""
    check = "import sys, dualmap_extproc.app.wiring; sys.exit('envoy_data_plane' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False, timeout=60).returncode == 0
