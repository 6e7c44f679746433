"""``dualmap epp`` behind a real Envoy that is configured as gateways with the Inference Extension configure it.

Both bodies are FULL_DUPLEX_STREAMED, the pick is read from the metadata only, and the served endpoint is reported. The
engines are the target ports of one pod. Pods have no loopback addresses, so the engines listen on the machine's own.
"""

import asyncio
import hashlib
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from dualmap_extproc.names import DESTINATION_HEADER
from harness import fail_open
from harness.clients import http1
from harness.envoy import Envoy
from harness.processes import Child, dualmap_argv
from harness.stack import TRANSPORT_OPTION, Router
from harness.upstream import DIGEST_HEADER, Upstream, sse
from harness.waiting import until
from kube_api import KubeApi, kube_api, pod_body

pytestmark = pytest.mark.always_picked

CHAT = "/v1/chat/completions"
TYPES = "type.googleapis.com/envoy"
# What llm-d's Envoy sets: a body that goes back to it needs several windows.
NARROW_WINDOWS = {"initial_stream_window_size": 65_536, "initial_connection_window_size": 1_048_576}
NARROW_BUFFER_BYTES = 32_768


def own_address() -> str:
    """Return an address of this machine that is not loopback; skip the test if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("the machine has no address besides loopback")
        address: str = probe.getsockname()[0]
    return address


def chat(text: str) -> bytes:
    return json.dumps({"model": "any", "messages": [{"role": "user", "content": text}]}).encode()


class Picker(Router):
    """A ``dualmap epp`` on free ports of 127.0.0.1."""

    def __init__(self, kubeconfig: Path, *arguments: str, directory: Path) -> None:
        argv = ["epp", "--host=127.0.0.1", "--pool-name=qwen", "--pool-namespace=llm", f"--kubeconfig={kubeconfig}"]
        argv += [f"--{port}-port=0" for port in ("grpc", "grpc-health", "metrics", "als")]
        Child.__init__(self, "epp", dualmap_argv(*argv, *TRANSPORT_OPTION, *arguments), directory=directory)
        self.ports: dict[str, int] = {}

    async def start(self) -> None:
        await Child.start(self)
        line = await self.wait_for_line(r"dualmap epp ready (.*)")
        pairs = (part.split("=", 1) for part in line[1].split())
        self.ports = {kind: int(address.rpartition(":")[2]) for kind, address in pairs}
        fail_open.watch_router(self, self._status)


def gateway(picker_port: int, address: str, ports: list[int], *, narrow: bool = False) -> str:
    """Return the configuration of an Envoy like Istio's for an InferencePool; ``narrow``: with llm-d's buffers."""
    mode = {"request_header_mode": "SEND", "response_header_mode": "SEND"}
    mode |= {f"{each}_body_mode": "FULL_DUPLEX_STREAMED" for each in ("request", "response")}
    mode |= {f"{each}_trailer_mode": "SEND" for each in ("request", "response")}
    lb = {"untyped": ["envoy.lb"]}
    ext_proc = {
        "@type": f"{TYPES}.extensions.filters.http.ext_proc.v3.ExternalProcessor",
        "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}},
        "message_timeout": "1000s",
        "processing_mode": mode,
        "metadata_options": {"receiving_namespaces": lb, "forwarding_namespaces": lb},
    }
    routing = {"cluster": "pool", "timeout": "0s", "retry_policy": {"retry_on": "connect-failure", "num_retries": 2}}
    manager = {
        "@type": f"{TYPES}.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "in",
        "route_config": {
            "virtual_hosts": [{"name": "v", "domains": ["*"], "routes": [{"match": {"prefix": "/"}, "route": routing}]}]
        },
        "http_filters": [
            {"name": "ext_proc", "typed_config": ext_proc},
            {"name": "router", "typed_config": {"@type": f"{TYPES}.extensions.filters.http.router.v3.Router"}},
        ],
    }
    round_robin = f"{TYPES}.extensions.load_balancing_policies.round_robin.v3.RoundRobin"
    fallback = {"typed_extension_config": {"name": "rr", "typed_config": {"@type": round_robin}}}
    override = {
        "@type": f"{TYPES}.extensions.load_balancing_policies.override_host.v3.OverrideHost",
        "override_host_sources": [{"metadata": {"key": "envoy.lb", "path": [{"key": DESTINATION_HEADER}]}}],
        "selected_host_key": {"key": "envoy.lb", "path": [{"key": f"{DESTINATION_HEADER}-served"}]},
        "fallback_policy": {"policies": [fallback]},
    }
    tls = {
        "@type": f"{TYPES}.extensions.transport_sockets.tls.v3.UpstreamTlsContext",
        "common_tls_context": {"alpn_protocols": ["h2"]},
    }
    http2 = {
        "@type": f"{TYPES}.extensions.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": NARROW_WINDOWS if narrow else {}},
    }
    picker = {
        **_cluster("picker", "127.0.0.1", [picker_port]),
        "transport_socket": {"name": "tls", "typed_config": tls},
        "typed_extension_protocol_options": {
            f"{TYPES.partition('/')[2]}.extensions.upstreams.http.v3.HttpProtocolOptions": http2
        },
    }
    policy = {"typed_extension_config": {"name": "override_host", "typed_config": override}}
    pool = {**_cluster("pool", address, ports), "load_balancing_policy": {"policies": [policy]}}
    listener = {
        "name": "l",
        "address": {"socket_address": {"address": "127.0.0.1", "port_value": 0}},
        "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
        **({"per_connection_buffer_limit_bytes": NARROW_BUFFER_BYTES} if narrow else {}),
    }
    admin = {"address": {"socket_address": {"address": "127.0.0.1", "port_value": 0}}}
    return yaml.safe_dump({"admin": admin, "static_resources": {"listeners": [listener], "clusters": [picker, pool]}})


def _cluster(name: str, address: str, ports: list[int]) -> dict[str, Any]:
    hosts = [{"endpoint": {"address": {"socket_address": {"address": address, "port_value": port}}}} for port in ports]
    return {
        "name": name,
        "type": "STATIC",
        "connect_timeout": "1s",
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": hosts}]},
    }


@dataclass(slots=True, kw_only=True)
class Site:
    """Two engines, the picker and the gateway."""

    engines: list[Upstream]
    picker: Picker
    envoy: Envoy

    async def post(self, body: bytes, **headers: str) -> Any:
        return await http1(self.envoy.url + CHAT, body=body, headers=headers)


@asynccontextmanager
async def site(tmp_path: Path, *arguments: str, narrow: bool = False) -> AsyncIterator[Site]:
    address = own_address()
    engines = [Upstream(name=f"engine-{number}", host=address) for number in range(2)]
    async with kube_api(tmp_path) as api, engines[0], engines[1]:
        await _publish(api, address, [each.port for each in engines])
        async with Picker(api.kubeconfig, *arguments, directory=tmp_path) as picker:
            config = gateway(picker.ports["grpc"], address, [each.port for each in engines], narrow=narrow)
            async with Envoy(config, directory=tmp_path) as envoy:
                yield Site(engines=engines, picker=picker, envoy=envoy)


async def _publish(api: KubeApi, address: str, ports: list[int]) -> None:
    await api.put(
        {
            "apiVersion": "inference.networking.k8s.io/v1",
            "kind": "InferencePool",
            "metadata": {"name": "qwen", "namespace": "llm"},
            "spec": {
                "selector": {"matchLabels": {"serving.dualmap.dev/pool": "qwen"}},
                "targetPorts": [{"number": port} for port in ports],
            },
        }
    )
    await api.put(pod_body("qwen-0", address=address))


@pytest.mark.parametrize("narrow", [False, True], ids=["Envoy's buffers", "llm-d's buffers"])
async def test_epp_routes_large_bodies_and_streams_through_a_gateway(tmp_path: Path, narrow: bool) -> None:
    async with site(tmp_path, narrow=narrow) as at:
        for size in (100, 3_000_000):
            body = chat("x" * size)
            reply = await at.post(body)
            assert reply.status == 200
            assert reply.headers[DIGEST_HEADER] == hashlib.sha256(body).hexdigest()
        events = [f"data: {number}\n\n".encode() for number in range(200)]
        for engine in at.engines:
            engine.answer = sse(events)
        replies = await asyncio.gather(*(at.post(chat(f"{n}" * 50)) for n in range(20)))
        assert {reply.body for reply in replies} == {b"".join(events)}
        picked = [r.headers[DESTINATION_HEADER] for each in at.engines for r in each.received if r.method == "POST"]
        served = [each.endpoint for each in at.engines for r in each.received if r.method == "POST"]
        assert [each.split(",")[0] for each in picked] == served

        async def all_finished() -> bool:
            return await at.picker.metric("dualmap_completions_total", outcome="finished") == 22

        await until(all_finished, "all requests have finished")
        assert await at.picker.metric("dualmap_picks_not_followed_total") == 0


async def test_gateway_uses_the_second_member_of_a_pick(tmp_path: Path) -> None:
    async with site(tmp_path) as at:
        await at.engines[0].stop()
        replies = [await at.post(chat(f"{n}" * 50)) for n in range(8)]
        assert {reply.status for reply in replies} == {200}
        assert await at.picker.metric("dualmap_picks_not_followed_total") == 0


async def test_single_destination_names_one_member(tmp_path: Path) -> None:
    async with site(tmp_path, "--single-destination") as at:
        await at.post(chat("x"))
        (picked,) = [r.headers[DESTINATION_HEADER] for each in at.engines for r in each.received if r.method == "POST"]
        assert picked in {each.endpoint for each in at.engines}
