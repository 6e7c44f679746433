"""Names and cluster addresses of Services."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from emulated_cluster.control_plane.cluster import Cluster
from emulated_cluster.kubelet.fixtures import kubelet_on
from emulated_cluster.kubelet.isolation.roots import Image
from emulated_cluster.kubelet.process_kubelet import ProcessKubelet
from emulated_cluster.services.services import Services
from emulated_cluster.waiting import until
from namespaces import (
    IMAGE,
    PYTHON,
    WITHIN_S,
    Namespace,
    busybox,
    busybox_root,
    new_namespace,
    pod,
    restricted,
    this_machine,
)

Object = dict[str, Any]

# Addresses of this machine for endpoints that are not pods, in the same block as the control plane's addresses.
NEAR, FAR = "10.244.255.11", "10.244.255.12"


@pytest.fixture(scope="module", name="services")
def _services(cluster: Cluster) -> Iterator[Services]:
    with Services(cluster) as services:
        yield services


@pytest_asyncio.fixture(name="namespace")
async def _namespace(cluster: Cluster, services: Services) -> AsyncIterator[Namespace]:
    async with new_namespace(cluster) as namespace:
        yield namespace


async def test_service_connections_rotate_over_ready_endpoints(namespace: Namespace) -> None:
    async with answering(NEAR, b"near"), answering(FAR, b"far"):
        namespace.apply(service("turns", ports=[{"name": "http", "port": 80, "targetPort": 8000}]))
        where = cluster_address(namespace, "turns")
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(where, 80)

        namespace.apply(endpoints("turns", {NEAR: True, FAR: True}))
        await until_reached(where)
        said = [await ask(where) for _ in range(4)]
        assert sorted(said[:2]) == [b"far", b"near"]
        assert said[2:] == said[:2]

        namespace.apply(endpoints("turns", {NEAR: False, FAR: True}))

        async def only_far() -> bool:
            return [await ask(where) for _ in range(2)] == [b"far", b"far"]

        await until(only_far, "only the ready endpoint is asked", timeout_s=WITHIN_S)
        namespace.kubectl("delete", "service", "turns")

        async def refused() -> bool:
            try:
                await ask(where)
            except ConnectionError:
                return True
            return False

        await until(refused, "the Service is gone", timeout_s=WITHIN_S)


async def test_open_stream_survives_endpoint_removal_and_half_close(namespace: Namespace) -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(65536):
            writer.write(piece)
        # The response follows after the client has closed its sending half.
        writer.write(b"the end")
        writer.close()

    async with await asyncio.start_server(echo, NEAR, 8000):
        namespace.apply(service("long", ports=[{"name": "http", "port": 80}]), endpoints("long", {NEAR: True}))
        where = cluster_address(namespace, "long")
        await until_reached(where)
        reader, writer = await asyncio.open_connection(where, 80)
        writer.write(b"one")
        assert await reader.readexactly(3) == b"one"

        namespace.apply(endpoints("long", {NEAR: False}))

        async def refused() -> bool:
            try:
                _, late = await asyncio.open_connection(where, 80)
            except ConnectionRefusedError:
                return True
            late.close()
            return False

        await until(refused, "the Service has no endpoint", timeout_s=WITHIN_S)
        # More bytes than the total capacity of the buffers on the path.
        much = bytes(1 << 24)
        writer.write(much)
        writer.write_eof()
        assert await reader.readexactly(len(much)) == much
        assert await reader.read() == b"the end"
        writer.close()


async def test_pod_resolves_service_names(
    namespace: Namespace, cluster: Cluster, services: Services, tmp_path: Path
) -> None:
    labels = {"app": "web"}
    server = busybox("mkdir /www/d; hostname > /www/name; exec httpd -f -p 8000 -h /www")
    server["volumeMounts"] = [{"name": "www", "mountPath": "/www"}]
    server["ports"] = [{"name": "http", "containerPort": 8000}]
    spec = restricted("", server, volumes=[{"name": "www", "emptyDir": {}}])["spec"]
    workload = {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": "web"},
        "spec": {
            "replicas": 2,
            "podManagementPolicy": "Parallel",
            "serviceName": "members",
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": spec},
        },
    }
    ports = [{"name": "http", "port": 80, "targetPort": "http"}]
    script = (
        "import json, socket, sys, urllib.request\n"
        "from kubernetes import client, config\n"
        "def find(name):\n"
        "    try: return sorted({each[4][0] for each in socket.getaddrinfo(name, 80)})\n"
        "    except socket.gaierror as error: return str(error)\n"
        "found = {name: find(name) for name in sys.argv[1:]}\n"
        "found['said'] = urllib.request.urlopen('http://web/name').read().decode().strip()\n"
        "config.load_incluster_config()\n"
        "settings = client.Configuration.get_default_copy()\n"
        "settings.host = 'https://kubernetes.default.svc'\n"
        "found['version'] = client.VersionApi(client.ApiClient(settings)).get_code().major\n"
        "print(json.dumps(found), flush=True)\n"
        "import time; time.sleep(3600)"
    )
    ns = namespace.name
    names = ["web", f"web.{ns}", f"web.{ns}.svc.cluster.local", "members", "web-1.members", "other", "nowhere"]
    images: dict[str, Path | Image] = {
        IMAGE: busybox_root(tmp_path),
        PYTHON: this_machine(),
    }
    namespace.apply(
        service("web", ports=ports, selector=labels),
        service("members", ports=ports, selector=labels, clusterIP="None"),
        service("other", type="ExternalName", externalName=f"web.{ns}.svc.cluster.local"),
    )
    with kubelet_on(cluster, "names", images=images, nameserver=services.nameserver) as kubelet:
        namespace.apply(workload)

        async def served() -> bool:
            return len(await namespace.ready_endpoints("members")) == 2

        await until(served, "two endpoints", timeout_s=WITHIN_S)
        namespace.apply(pod("asker", {"name": "main", "image": PYTHON, "args": ["-c", script, *names]}))
        found = json.loads(await said_by(namespace, kubelet, "asker"))
        members = {each: kubelet.pod(ns, each).address for each in ("web-0", "web-1")}

    address = cluster_address(namespace, "web")
    assert found == {
        "web": [address],
        f"web.{ns}": [address],
        f"web.{ns}.svc.cluster.local": [address],
        "members": sorted(members.values()),
        "web-1.members": [members["web-1"]],
        "other": [address],
        "nowhere": "[Errno -2] Name or service not known",
        "said": found["said"],
        "version": "1",
    }
    assert found["said"] in members


def service(name: str, **spec: Any) -> Object:
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": spec}


def endpoints(service: str, ready: Mapping[str, bool]) -> Object:
    """Return an EndpointSlice of port 8000 with these addresses and their readiness."""
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": service,
            "labels": {
                "kubernetes.io/service-name": service,
                "endpointslice.kubernetes.io/managed-by": "e2e.dualmap.dev",
            },
        },
        "addressType": "IPv4",
        "ports": [{"name": "http", "port": 8000}],
        "endpoints": [{"addresses": [each], "conditions": {"ready": is_ready}} for each, is_ready in ready.items()],
    }


@asynccontextmanager
async def answering(address: str, word: bytes) -> AsyncIterator[None]:
    """A server that sends one word on every connection."""

    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(word)
        writer.close()

    async with await asyncio.start_server(say, address, 8000):
        yield


async def ask(address: str) -> bytes:
    reader, writer = await asyncio.open_connection(address, 80)
    try:
        return await reader.read()
    finally:
        writer.close()


async def until_reached(address: str) -> None:
    async def reached() -> bool:
        try:
            _, writer = await asyncio.open_connection(address, 80)
        except ConnectionRefusedError:
            return False
        writer.close()
        return True

    await until(reached, f"{address} is proxied", timeout_s=WITHIN_S)


async def said_by(namespace: Namespace, kubelet: ProcessKubelet, name: str) -> str:
    return await namespace.log(kubelet, name, "}\n")


def cluster_address(namespace: Namespace, name: str) -> str:
    return namespace.kubectl("get", "service", name, "-o", "jsonpath={.spec.clusterIP}")
