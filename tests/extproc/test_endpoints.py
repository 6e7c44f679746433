import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import pytest

from dualmap.pool import Member, MemberState, Model, Pool
from dualmap_extproc.endpoints import (
    MAX_NAMES,
    EndpointDiscovery,
    Rejection,
    Snapshot,
    Subscription,
    SubscriptionError,
    load_assignment,
    snapshot_of,
)
from dualmap_extproc.names import CLUSTER_LOAD_ASSIGNMENT_TYPE, EDS_METHOD, EDS_SERVICE
from dualmap_extproc.wire import base_pb2, discovery_pb2
from waiting import until

METHOD = f"/{EDS_SERVICE}/{EDS_METHOD}"
QWEN, LLAMA = "llm/qwen", "llm/llama"


def pool(name: str = "qwen", count: int = 2, **changes: object) -> Pool:
    members = tuple(Member(id=f"{name}-{n}", address=f"10.0.0.{n + 1}", port=8000) for n in range(count))
    whole = Pool(namespace="llm", name=name, model=Model(name=name), members=members)
    return replace(whole, **changes)  # type: ignore[arg-type]  # the fields differ in type


def request(*names: str, nonce: str = "", version: str = "", error: str = "") -> discovery_pb2.DiscoveryRequest:
    message = discovery_pb2.DiscoveryRequest(
        resource_names=names, type_url=CLUSTER_LOAD_ASSIGNMENT_TYPE, response_nonce=nonce, version_info=version
    )
    message.node.id = "envoy-1"
    if error:
        message.error_detail.message = error
    return message


def hosts(response: discovery_pb2.DiscoveryResponse) -> dict[str, list[str]]:
    """The endpoints of each resource of a response."""
    found = {}
    for resource in response.resources:
        assert resource.type_url == CLUSTER_LOAD_ASSIGNMENT_TYPE
        assignment = discovery_pb2.ClusterLoadAssignment.FromString(resource.value)
        found[assignment.cluster_name] = [
            f"{host.endpoint.address.socket_address.address}:{host.endpoint.address.socket_address.port_value}"
            for locality in assignment.endpoints
            for host in locality.lb_endpoints
        ]
    return found


def ack(subscription: Subscription, response: discovery_pb2.DiscoveryResponse, *names: str) -> None:
    assert subscription.on_request(request(*names, nonce=response.nonce, version=response.version_info)) is None


def due(subscription: Subscription, snapshot: Snapshot) -> discovery_pb2.DiscoveryResponse:
    response = subscription.respond(snapshot)
    assert response is not None
    return response


class TestResources:
    def test_the_state_of_a_member_is_the_health_of_its_host(self) -> None:
        members = tuple(
            Member(id=state, address=f"10.0.0.{n}", port=8000, state=state) for n, state in enumerate(MemberState)
        )
        assignment = load_assignment(pool(members=members))
        assert [host.health_status for host in assignment.endpoints[0].lb_endpoints] == [
            base_pb2.HEALTHY,
            base_pb2.HEALTHY,
            base_pb2.DRAINING,
        ]

    def test_ipv6_addresses_go_without_brackets(self) -> None:
        members = (Member(id="a", address="fd00::1", port=8000),)
        (host,) = load_assignment(pool(members=members)).endpoints[0].lb_endpoints
        assert host.endpoint.address.socket_address.address == "fd00::1"

    def test_an_empty_pool_is_a_resource_without_endpoints(self) -> None:
        assert load_assignment(pool(count=0)) == discovery_pb2.ClusterLoadAssignment(cluster_name=QWEN)


class TestSubscription:
    def test_an_ack_is_answered_with_silence(self) -> None:
        subscription, snapshot = Subscription(), snapshot_of([pool()])
        subscription.on_request(request(QWEN))
        response = due(subscription, snapshot)
        assert hosts(response) == {QWEN: ["10.0.0.1:8000", "10.0.0.2:8000"]}
        assert response.type_url == CLUSTER_LOAD_ASSIGNMENT_TYPE
        ack(subscription, response, QWEN)
        assert subscription.respond(snapshot) is None

    def test_nothing_is_due_before_the_first_request(self) -> None:
        assert Subscription().respond(snapshot_of([pool()])) is None

    def test_the_first_request_is_answered_whatever_version_the_peer_has(self) -> None:
        first, snapshot = Subscription(), snapshot_of([pool()])
        first.on_request(request(QWEN))
        version = due(first, snapshot).version_info
        again = Subscription()
        again.on_request(request(QWEN, version=version, nonce="41"))
        assert due(again, snapshot).version_info == version

    def test_a_change_is_due_once_with_a_new_version_and_nonce(self) -> None:
        subscription = Subscription()
        subscription.on_request(request(QWEN))
        first = due(subscription, snapshot_of([pool(count=2)]))
        changed = snapshot_of([pool(count=3)])
        second = due(subscription, changed)
        assert first.version_info != second.version_info
        assert first.nonce != second.nonce
        assert subscription.respond(changed) is None
        # Back to what it was is a change again.
        assert due(subscription, snapshot_of([pool(count=2)])).version_info == first.version_info

    def test_what_envoy_cannot_see_is_no_change(self) -> None:
        subscription = Subscription()
        subscription.on_request(request(QWEN))
        due(subscription, snapshot_of([pool(ring_version=1)]))
        members = tuple(replace(member, weight=7) for member in pool().members)
        assert subscription.respond(snapshot_of([pool(ring_version=2, members=members)])) is None

    def test_only_what_changed_is_sent_and_only_what_was_asked_for(self) -> None:
        subscription = Subscription()
        subscription.on_request(request(QWEN, LLAMA))
        assert hosts(due(subscription, snapshot_of([pool(), pool("llama", 1), pool("other", 1)]))).keys() == {
            QWEN,
            LLAMA,
        }
        assert hosts(due(subscription, snapshot_of([pool(), pool("llama", 2), pool("other", 2)]))).keys() == {LLAMA}

    def test_a_name_added_later_is_answered_alone(self) -> None:
        subscription, snapshot = Subscription(), snapshot_of([pool(), pool("llama", 1)])
        subscription.on_request(request(QWEN))
        response = due(subscription, snapshot)
        ack(subscription, response, QWEN, LLAMA)
        assert hosts(due(subscription, snapshot)).keys() == {LLAMA}

    def test_a_name_dropped_and_asked_for_again_is_sent_again(self) -> None:
        subscription, snapshot = Subscription(), snapshot_of([pool(), pool("llama", 1)])
        subscription.on_request(request(QWEN, LLAMA))
        response = due(subscription, snapshot)
        ack(subscription, response, QWEN)
        assert subscription.respond(snapshot) is None
        ack(subscription, response, QWEN, LLAMA)
        assert hosts(due(subscription, snapshot)).keys() == {LLAMA}

    def test_a_refused_version_is_not_sent_again_until_it_changes(self) -> None:
        subscription, snapshot = Subscription(), snapshot_of([pool()])
        subscription.on_request(request(QWEN))
        response = due(subscription, snapshot)
        rejection = subscription.on_request(request(QWEN, nonce=response.nonce, version="old", error="malformed IP"))
        assert rejection == Rejection(version="old", reason="malformed IP")
        assert subscription.respond(snapshot) is None
        assert subscription.respond(snapshot_of([pool(count=1)])) is not None

    def test_a_word_on_an_older_response_is_passed_over(self) -> None:
        subscription = Subscription()
        subscription.on_request(request(QWEN))
        first = due(subscription, snapshot_of([pool(count=1)]))
        changed = snapshot_of([pool(count=2)])
        due(subscription, changed)
        assert subscription.on_request(request(nonce=first.nonce, error="late")) is None
        assert subscription.respond(changed) is None
        # Had it been taken, its empty list of names would have ended the subscription.
        assert subscription.respond(snapshot_of([pool(count=3)])) is not None

    def test_a_vanished_pool_loses_its_endpoints_and_an_unknown_one_has_none(self) -> None:
        subscription = Subscription()
        subscription.on_request(request(QWEN, "llm/unknown"))
        assert hosts(due(subscription, snapshot_of([pool()]))) == {
            QWEN: ["10.0.0.1:8000", "10.0.0.2:8000"],
            "llm/unknown": [],
        }
        assert hosts(due(subscription, snapshot_of([]))) == {QWEN: []}

    def test_the_version_does_not_depend_on_the_order_of_names_or_pools(self) -> None:
        versions = set()
        for names in ((QWEN, LLAMA), (LLAMA, QWEN, LLAMA)):
            for pools in ([pool(), pool("llama", 1)], [pool("llama", 1), pool()]):
                subscription = Subscription()
                subscription.on_request(request(*names))
                versions.add(due(subscription, snapshot_of(pools)).version_info)
        assert len(versions) == 1

    def test_other_types_and_too_many_names_are_refused(self) -> None:
        with pytest.raises(SubscriptionError, match="ClusterLoadAssignment"):
            Subscription().on_request(discovery_pb2.DiscoveryRequest(type_url="type.googleapis.com/other"))
        with pytest.raises(SubscriptionError, match=str(MAX_NAMES)):
            Subscription().on_request(request(*(str(n) for n in range(MAX_NAMES + 1))))
        Subscription().on_request(discovery_pb2.DiscoveryRequest(resource_names=[QWEN]))


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
        while await asyncio.wait_for(self.streams.get(), 20) != count:
            pass


Call = grpc.aio.StreamStreamCall[discovery_pb2.DiscoveryRequest, discovery_pb2.DiscoveryResponse]


class Service:
    """A discovery service on a port of its own, and the Envoys' side of it."""

    def __init__(self) -> None:
        self.counts = Counts()
        self.discovery = EndpointDiscovery(self.counts)
        self._server = grpc.aio.server()
        self._server.add_generic_rpc_handlers((self.discovery.handler(),))
        self.port = self._server.add_insecure_port("127.0.0.1:0")

    @asynccontextmanager
    async def started(self) -> AsyncIterator["Service"]:
        await self._server.start()
        try:
            yield self
        finally:
            await self._server.stop(None)

    @asynccontextmanager
    async def envoy(self) -> AsyncIterator[Callable[[], Call]]:
        # A channel of its own connection, as every Envoy has.
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self.port}", options=options) as channel:
            method = channel.stream_stream(
                METHOD,
                request_serializer=discovery_pb2.DiscoveryRequest.SerializeToString,
                response_deserializer=discovery_pb2.DiscoveryResponse.FromString,
            )
            yield lambda: method(None)


async def receive(call: Call) -> discovery_pb2.DiscoveryResponse:
    response = await asyncio.wait_for(call.read(), 20)
    assert isinstance(response, discovery_pb2.DiscoveryResponse)
    return response


async def status_of(call: Call) -> grpc.StatusCode:
    return await asyncio.wait_for(call.code(), 20)


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    async with Service().started() as started:
        yield started


class TestServing:
    async def test_nothing_is_answered_before_the_first_publish(self, service: Service) -> None:
        async with service.envoy() as opened:
            call = opened()
            await call.write(request(QWEN))
            await service.counts.until_streams(1)
            reading = asyncio.create_task(receive(call))
            await asyncio.sleep(0.05)
            assert not reading.done()
            service.discovery.publish([pool(count=1)])
            assert hosts(await reading) == {QWEN: ["10.0.0.1:8000"]}

    async def test_a_change_goes_to_every_envoy_and_the_same_again_to_none(self, service: Service) -> None:
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
            assert service.counts.pushed == 6

    async def test_an_envoy_that_does_not_read_holds_up_nobody_and_gets_the_latest(self, service: Service) -> None:
        """Its flow-control window fills with responses that it does not take."""
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
            # The slow one missed versions in between, and ends with the last.
            seen: list[int] = []
            while not seen or seen[-1] != last:
                seen.append(len(hosts(await receive(stuck))[QWEN]))
            assert len(seen) < 100

    async def test_an_envoy_that_breaks_off_is_forgotten(
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

    async def test_a_peer_that_is_done_gets_an_ordinary_end(self, service: Service) -> None:
        service.discovery.publish([pool()])
        async with service.envoy() as opened:
            call = opened()
            await call.write(request(QWEN))
            await receive(call)
            await call.done_writing()
            assert await status_of(call) is grpc.StatusCode.OK

    async def test_a_rejection_is_counted_and_logged_once(
        self, service: Service, caplog: pytest.LogCaptureFixture
    ) -> None:
        service.discovery.publish([pool(count=1)])
        async with service.envoy() as opened:
            call = opened()
            await call.write(request(QWEN))
            response = await receive(call)
            await call.write(request(QWEN, nonce=response.nonce, version="before", error="malformed"))
            # Its next news is the next change, not the refused one again.
            await call.write(request(QWEN, nonce=response.nonce, version="before"))
            await until(lambda: service.counts.rejected == 1)
            service.discovery.publish([pool(count=2)])
            assert len(hosts(await receive(call))[QWEN]) == 2
        assert service.counts.rejected == 1
        (record,) = caplog.records
        assert record.__dict__["details"] == {"envoy": "envoy-1", "accepted_version": "before", "reason": "malformed"}

    async def test_a_request_for_something_else_ends_its_stream_with_the_reason(self, service: Service) -> None:
        async with service.envoy() as opened:
            call = opened()
            await call.write(discovery_pb2.DiscoveryRequest(type_url="type.googleapis.com/other"))
            assert await status_of(call) is grpc.StatusCode.INVALID_ARGUMENT
            assert "ClusterLoadAssignment" in (await call.details() or "")
        await service.counts.until_streams(0)

    async def test_bytes_that_are_no_request_end_their_stream_only(self, service: Service) -> None:
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
