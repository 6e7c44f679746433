"""Traffic through Istio with DualMap as the picker, without the hooks of the conformance suite."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from controlplane import crds
from emulated_cluster.control_plane.cluster import ADVERTISED, Cluster
from emulated_cluster.kubelet.process_kubelet import ProcessKubelet
from gateways import images, istio, recordings
from gateways.checks import Gateway, metric
from gateways.site import MODEL, PICKER, PICKER_PORT, POOL, PREFILLS, ROLES, WITHIN_S, Site
from gateways.tap import Tap
from harness import fail_open
from harness.traffic import END_OF_STREAM, Outcome, Traffic, tally
from harness.upstream import Received, plain
from harness.waiting import until

_SERVED_ELSEWHERE = "dualmap_served_elsewhere_total"
_REQUESTS = "dualmap_requests_total"
_EVENTS = 20
_EVENT_PERIOD_S = 0.05
_STEADY = 20


@asynccontextmanager
async def _gateway(site: Site) -> AsyncIterator[Gateway]:
    """Yield a gateway of Istio that leads to the site's pool, when it serves."""
    istio.use_tls_without_verification(site.cluster, PICKER, site.namespace)
    site.apply(*istio.gateway("gateway", POOL))
    host = ""

    async def addressed() -> bool:
        nonlocal host
        services = await asyncio.to_thread(site.objects, "services")
        names = {each["metadata"]["name"]: each["spec"]["clusterIP"] for each in services}
        host = names.get(f"gateway-{istio.CLASS}", "")
        return bool(host)

    await until(addressed, "Istio has created the gateway's Service", timeout_s=WITHIN_S)
    gateway = Gateway(site, host, istio.PORT)
    pods: list[dict[str, Any]] = []

    async def created() -> bool:
        pods[:] = await asyncio.to_thread(site.objects, "pods", "-l", f"{istio.GATEWAY_LABEL}=gateway")
        return len(pods) == 1 and bool(pods[0]["status"].get("podIP"))

    await until(created, "Istio has created the gateway's pod", timeout_s=WITHIN_S)
    await gateway.until_serving()
    with fail_open.counting(f"http://{pods[0]['status']['podIP']}:{images.ADMIN_PORT}"):
        yield gateway


@pytest_asyncio.fixture(name="gateway")
async def _gateway_with_picker(site: Site, running_istio: None) -> AsyncIterator[Gateway]:
    site.deploy_picker()
    site.publish_picker()
    await site.picker_pods(1)
    async with _gateway(site) as gateway:
        yield gateway


@pytest.mark.always_picked
async def test_picks_are_followed_and_counted_otherwise(gateway: Gateway) -> None:
    await gateway.check_picks()
    await gateway.check_forged_destination()
    (picker,) = await gateway.site.picker_pods(1)
    assert await metric(picker["status"]["podIP"], _SERVED_ELSEWHERE) == 0

    await gateway.check_dead_first_pick()

    async def counted() -> bool:
        return await metric(picker["status"]["podIP"], _SERVED_ELSEWHERE) == 1

    await until(counted, "the request that the second engine served is counted")


@pytest.mark.always_picked
async def test_event_stream_is_forwarded_without_delay(gateway: Gateway) -> None:
    await gateway.check_event_stream()


@pytest.mark.always_picked
async def test_large_bodies_arrive_complete(gateway: Gateway) -> None:
    await gateway.check_large_bodies()


@pytest.mark.always_picked
@pytest.mark.xfail(
    strict=True, reason="the engine gets another body: Istio sets retries, and Envoy 1.40 repeats bodies"
)
async def test_body_with_trailers_arrives_once(gateway: Gateway) -> None:
    await gateway.check_trailers()


@pytest.mark.always_picked
async def test_two_pickers_share_the_requests(site: Site, running_istio: None) -> None:
    site.deploy_picker(replicas=2)
    site.publish_picker()
    pickers = [each["status"]["podIP"] for each in await site.picker_pods(2)]
    async with _gateway(site) as gateway:

        async def both_used() -> bool:
            await gateway.check_picks(requests=30)
            return min([await metric(each, _REQUESTS) for each in pickers]) > 0

        await until(both_used, "both pickers have requests", timeout_s=WITHIN_S)


@pytest.mark.always_picked
async def test_pods_that_prefill_are_named_to_the_pods_that_decode(cluster: Cluster, running_istio: None) -> None:
    crds.install(cluster, crds.GAIE_FILE, crds.GAIE_NAME)
    async with Site(cluster, roles=ROLES) as site:
        site.deploy_picker(PREFILLS)
        site.publish_picker()
        await site.picker_pods(1)
        async with _gateway(site) as gateway:
            await gateway.check_prefills()


@pytest.mark.parametrize("failure_mode", ["FailClose", "FailOpen"])
async def test_traffic_recovers_from_a_killed_picker(
    cluster: Cluster, node: ProcessKubelet, running_istio: None, failure_mode: str
) -> None:
    async with Site(cluster, failure_mode=failure_mode) as site:
        for engine in site.engines.values():
            engine.answer = _answer
        site.deploy_picker()
        site.publish_picker()
        (picker,) = await site.picker_pods(1)
        async with _gateway(site) as gateway:
            traffic = Traffic(lambda: gateway.url, _body, streams=4, plain=2)
            async with traffic.running():
                await traffic.flowing()
                incident = traffic.incident()
                node.kill(node.pod(site.namespace, picker["metadata"]["name"]))
                await site.picker_restarted()
                await _until_routed(traffic)
                recovered = len(traffic.exchanges)
                await traffic.flowing(50)
            incident.report(f"Istio, {failure_mode}: picker killed")
            after = traffic.exchanges[recovered:]
            assert tally(after).keys() == {Outcome.OK.value}
            assert all(each.routed for each in after)
            assert Outcome.STUCK not in {each.outcome for each in incident.everyone}


@pytest.mark.always_picked
async def test_streams_are_as_recorded(site: Site, running_istio: None) -> None:
    site.deploy_picker("--secure-serving=false")
    (picker,) = await site.picker_pods(1)
    async with Tap(f"{picker['status']['podIP']}:{PICKER_PORT}", host=ADVERTISED, port=0) as tap:
        site.publish_picker(at=(ADVERTISED, tap.port))
        async with _gateway(site) as gateway:
            conversations = await recordings.record(site, tap, host=gateway.host, port=gateway.port)
    recordings.check_or_write("istio", conversations)


async def _until_routed(traffic: Traffic) -> None:
    """Wait until the gateway again connects to the picker: the last finished requests are all picked."""

    async def routed() -> bool:
        finished = [each for each in traffic.exchanges if each.outcome is not None][-_STEADY:]
        return all(each.outcome is Outcome.OK and each.routed for each in finished)

    mark = len(traffic.exchanges)
    await until(lambda: _enough(traffic, mark), "requests after the restart", timeout_s=WITHIN_S)
    await until(routed, "the gateway follows the restarted picker", timeout_s=WITHIN_S)


async def _enough(traffic: Traffic, mark: int) -> bool:
    return sum(each.outcome is not None for each in traffic.exchanges[mark:]) >= _STEADY


def _body(number: int) -> dict[str, object]:
    return {"model": MODEL, "messages": [{"role": "user", "content": f"prompt {number}"}]}


async def _answer(request: web.Request, received: Received) -> web.StreamResponse:
    """Answer like an engine; a stream takes about a second, so that a fault finds open streams."""
    if not json.loads(received.body).get("stream"):
        return await plain(request, received)
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    for number in range(_EVENTS):
        await response.write(b'data: {"number": %d}\n\n' % number)
        await asyncio.sleep(_EVENT_PERIOD_S)
    await response.write(END_OF_STREAM)
    await response.write_eof()
    return response
