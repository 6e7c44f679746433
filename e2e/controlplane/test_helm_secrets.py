"""The chart's default against a pod of the cluster without a certificate or password, and the Secrets' life.

The operator generates certificates and password into Secrets that the chart creates empty.
"""

import asyncio
import base64
from collections import Counter
from collections.abc import Mapping

import aiohttp
import grpc
import pytest

from controlplane.chart_node import chart_kubelet  # noqa: F401  # pytest finds fixtures by import
from controlplane.site import POOL, RELEASE, Site, until_so
from dualmap_extproc.names import ACCESS_LOG_METHOD, ACCESS_LOG_SERVICE, EDS_METHOD, EDS_SERVICE
from dualmap_extproc.wire import access_log_pb2, discovery_pb2
from emulated_cluster.kubelet.process_kubelet import ProcessKubelet

SECRETS = ("authority", "router-mtls", "gateway-mtls", "redis-password", "hash-key")
PLAIN: Mapping[str, bytes] = {}
_ANSWER_S = 30.0
_STEADY_S = 5.0


@pytest.mark.timeout(900, func_only=True)
async def test_default_rejects_strangers_and_keeps_its_secrets(site: Site, kubelet: ProcessKubelet) -> None:
    await site.install({"router": {"tls": {"mode": "none"}}})
    await site.make_pool(2)
    await site.until_answered()
    router = await address(site, "router")

    async def both_known() -> bool:
        return await endpoints_read(router, site.namespace, PLAIN) == 2

    # The gateway answers as soon as one pod is ready.
    await until_so(both_known, "the router knows both pods")
    assert await end_reported(router, PLAIN)

    async with site.requests() as outcomes:
        await site.upgrade("0.2.0", {"router": {"tls": {"mode": "auto"}}})
        for component in ("operator", "router", "gateway"):
            await site.until_deployed(component, 2)
        await site.until_answered()
    print(f"requests during the change from plain text to mutual TLS: {dict(outcomes)}")
    # helm/dualmap/README.md states what clients may get meanwhile.
    assert set(outcomes) <= {"decided", "undecided", "HTTP 503"}
    await until_steady(site)

    secrets = await contents(site)
    assert not [name for name, data in secrets.items() if not data]
    router = await address(site, "router")
    envoy, server = ({key: base64.b64decode(value) for key, value in secrets[name].items()}
                     for name in ("gateway-mtls", "router-mtls"))  # fmt: skip
    assert await endpoints_read(router, site.namespace, envoy) == 2
    assert await end_reported(router, envoy)
    # Routers connect to each other with their own certificates.
    assert await endpoints_read(router, site.namespace, server) == 2
    strangers = {"plain text": PLAIN, "no certificate": {"ca.crt": envoy["ca.crt"]}}
    for who, credentials in strangers.items():
        assert await endpoints_read(router, site.namespace, credentials) is None, who
        assert not await end_reported(router, credentials), who

    assert await redis_says(await address(site, "redis"), "INFO") == "-NOAUTH Authentication required."
    await until_so(lambda: uses_redis(site), "both routers use Redis")

    async with site.requests() as outcomes:
        await site.upgrade("0.3.0", {"router": {"logLevel": "debug"}})
        await site.until_deployed("router", 2)
        assert await contents(site) == secrets
        await site.helm("rollback", RELEASE, "2", "--wait", "--timeout", "5m")
        await site.until_deployed("router", 2)
        assert await contents(site) == secrets
    assert set(outcomes) == {"decided"}

    await replace_authority(site, secrets)

    # A pool's deletion drains it, for which the operator asks routers.
    await site.delete_pool()
    assert site.refused() == []
    await site.helm("uninstall", RELEASE, "--wait", "--timeout", "5m")


async def replace_authority(site: Site, before: Mapping[str, Mapping[str, str]]) -> None:
    """Replace the authority as after a leak; the former certificates are rejected, and Envoy has new ones."""
    leaked = {key: base64.b64decode(value) for key, value in before["gateway-mtls"].items()}
    await site.kubectl("patch", f"secret/{RELEASE}-authority", "--type=merge", "--patch", '{"data": null}')

    async def replaced() -> bool:
        routers = await addresses(site, "router")
        return [await endpoints_read(router, site.namespace, leaked) for router in routers] == [None, None]

    await until_so(replaced, "routers reject the former certificate")
    now = await contents(site)
    assert {name for name in SECRETS if now[name] == before[name]} == {"redis-password", "hash-key"}
    await site.until_answered()
    await until_steady(site)


async def until_steady(site: Site) -> None:
    """Wait until every request of some seconds has a router's decision.

    Each Envoy reads its new certificate at its own time.
    """
    last: Counter[str] = Counter()

    async def all_decided() -> bool:
        async with site.requests() as outcomes:
            await asyncio.sleep(_STEADY_S)
        last.clear()
        last.update(outcomes)
        return set(last) == {"decided"}

    try:
        await until_so(all_decided, "all requests are decided")
    except AssertionError as error:
        raise AssertionError(f"{error}; the last ones were {dict(last)}") from error


async def contents(site: Site) -> dict[str, dict[str, str]]:
    """Return the generated Secrets' data by the end of their names."""
    found = await asyncio.gather(*(site.get("secret", f"{RELEASE}-{name}") for name in SECRETS))
    return {name: secret.get("data", {}) for name, secret in zip(SECRETS, found, strict=True)}


async def address(site: Site, component: str) -> str:
    """Return the address of one of a component's pods."""
    return (await addresses(site, component))[0]


async def addresses(site: Site, component: str) -> list[str]:
    pods = await site.get("pods", "-l", f"app.kubernetes.io/component={component}")
    return [pod["status"]["podIP"] for pod in pods["items"] if "deletionTimestamp" not in pod["metadata"]]


def channel(target: str, credentials: Mapping[str, bytes]) -> grpc.aio.Channel:
    """Return a channel with the certificates of a Secret's content; without content in plain text."""
    if not credentials:
        return grpc.aio.insecure_channel(target)
    made = grpc.ssl_channel_credentials(credentials["ca.crt"], credentials.get("tls.key"), credentials.get("tls.crt"))
    return grpc.aio.secure_channel(target, made, [("grpc.ssl_target_name_override", f"{RELEASE}-router")])


async def endpoints_read(router: str, namespace: str, credentials: Mapping[str, bytes]) -> int | None:
    """Ask a router for the pool's endpoints as Envoy does; return their number, None if the router refuses."""
    async with channel(f"{router}:9002", credentials) as to:
        call = to.stream_stream(
            f"/{EDS_SERVICE}/{EDS_METHOD}",
            request_serializer=discovery_pb2.DiscoveryRequest.SerializeToString,
            response_deserializer=discovery_pb2.DiscoveryResponse.FromString,
        )(timeout=_ANSWER_S)
        try:
            await call.write(discovery_pb2.DiscoveryRequest(resource_names=[f"{namespace}/{POOL}"]))
            answer = await call.read()
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            return None
        finally:
            call.cancel()
    (resource,) = answer.resources
    pods = [f"10.244.{number}." for number in range(256)]
    assert any(pod.encode() in resource.value for pod in pods)
    return int(resource.value.count(b"10.244."))


async def end_reported(router: str, credentials: Mapping[str, bytes]) -> bool:
    """Report the end of a request as Envoy does; return whether the router accepts the report."""
    async with channel(f"{router}:9004", credentials) as to:
        call = to.stream_unary(
            f"/{ACCESS_LOG_SERVICE}/{ACCESS_LOG_METHOD}",
            request_serializer=access_log_pb2.StreamAccessLogsMessage.SerializeToString,
            response_deserializer=access_log_pb2.StreamAccessLogsResponse.FromString,
        )
        try:
            await call(iter([access_log_pb2.StreamAccessLogsMessage()]), timeout=_ANSWER_S)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            return False
    return True


async def redis_says(host: str, command: str) -> str:
    """Return the first line of Redis's answer to a client without a password."""
    reader, writer = await asyncio.open_connection(host, 6379)
    try:
        writer.write(f"{command}\r\n".encode())
        return (await asyncio.wait_for(reader.readline(), _ANSWER_S)).decode().rstrip()
    finally:
        writer.close()


async def uses_redis(site: Site) -> bool:
    """Return whether every router is connected to Redis."""
    async with aiohttp.ClientSession() as session:
        texts = []
        for host in await addresses(site, "router"):
            async with session.get(f"http://{host}:9090/metrics") as answer:
                texts.append(await answer.text())
    return all("\ndualmap_store_up 1.0\n" in text for text in texts)
