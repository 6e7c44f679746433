"""``dualmap epp`` as a process, with the arguments of other pickers' charts, on the tests' Kubernetes API."""

import asyncio
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from dualmap_extproc.transport.tls import self_signed
from extproc.envoy_messages import DUPLEX, chat, destination, request_body, request_headers
from extproc.router_processes import WAIT_S, Router, launch, stream
from extproc.test_main_kube import line_with
from extproc.test_pools_gaie import gaie_pool, objective
from kube_api import KubeApi, kube_api, pod_body

READY = re.compile(r"dualmap epp ready grpc=(\S+) health=(\S+) metrics=(\S+) als=(\S+)$")
# As the chart of the Gateway API Inference Extension 1.1 passes them.
CHART = (
    *("--pool-name", "qwen", "--pool-namespace", "llm", "--pool-group", "inference.networking.k8s.io"),
    *("--zap-encoder", "json", "--v", "1", "--tracing", "false", "--metrics-endpoint-auth=false"),
    "--total-queued-requests-metric=vllm:num_requests_waiting",
)
CONFIG = """\
apiVersion: inference.networking.x-k8s.io/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: queue-scorer
- type: kv-cache-utilization-scorer
- type: prefix-cache-scorer
- type: decode-filter
schedulingProfiles:
- name: default
  plugins: [{pluginRef: queue-scorer, weight: 2}, {pluginRef: prefix-cache-scorer, weight: 3}]
"""


@asynccontextmanager
async def seat(api: KubeApi, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    ports = [f"--{port}-port=0" for port in ("grpc", "grpc-health", "metrics", "als")]
    process = await launch("--host=127.0.0.1", *ports, *arguments, command="epp", KUBECONFIG=str(api.kubeconfig))
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def ready(process: asyncio.subprocess.Process) -> Router:
    match = READY.match(await line_with(process, "ready grpc="))
    assert match
    return Router(process, *match.groups())


async def health(router: Router, service: str) -> int:
    async with grpc.aio.insecure_channel(router.health) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        return (await health_pb2_grpc.HealthStub(channel).Check(request)).status


async def picked(channel: grpc.aio.Channel, body: bytes) -> str | None:
    call = stream(channel)
    await call.write(request_headers(DUPLEX))
    await call.write(request_body(body))
    answer = await call.read()
    call.cancel()
    return destination(answer)


async def test_epp_with_the_arguments_of_a_chart_serves_the_pool(tmp_path: Path) -> None:
    config = tmp_path / "default-plugins.yaml"
    config.write_text(CONFIG)
    async with kube_api(tmp_path) as api:
        for body in (pod_body("qwen-0"), objective("batch", -1)):
            await api.put(body)
        async with seat(api, *CHART, "--config-file", str(config), "--secure-serving=false") as process:
            assert '"flags": ["--total-queued-requests-metric"]' in await line_with(process, "Flags have no effect")
            assert "queue-scorer" in await line_with(process, "Plugins have no effect")
            assert '"plugins": ["decode-filter"]' in await line_with(process, "whatever its label llm-d.ai/role")
            await line_with(process, "Waiting for the pool, which does not exist")
            await api.put(gaie_pool())
            router = await ready(process)
            for service in ("", "liveness", "readiness", "inference-extension"):
                assert await health(router, service) == health_pb2.HealthCheckResponse.SERVING
            async with grpc.aio.insecure_channel(router.grpc) as channel:
                assert await picked(channel, chat(model="any/name")) == "10.244.0.1:8000"
            assert b"dualmap_picks_not_followed_total" in await router.get("/metrics")
            router.stop()
            assert await router.exited() == 0


async def test_epp_serves_tls_by_default(tmp_path: Path) -> None:
    key, certificate = self_signed()
    (tmp_path / "tls.key").write_bytes(key)
    (tmp_path / "tls.crt").write_bytes(certificate)
    async with kube_api(tmp_path) as api:
        await api.put(gaie_pool())
        await api.put(pod_body("qwen-0"))
        arguments = ("--pool-name=qwen", "--pool-namespace=llm", f"--cert-path={tmp_path}")
        async with seat(api, *arguments) as process:
            router = await ready(process)
            target = grpc.ssl_channel_credentials(certificate)
            names = (("grpc.ssl_target_name_override", "localhost"),)
            async with grpc.aio.secure_channel(router.grpc, target, options=names) as channel:
                assert await asyncio.wait_for(picked(channel, chat()), WAIT_S) == "10.244.0.1:8000"


async def test_epp_without_the_right_to_list_pods_says_so(tmp_path: Path) -> None:
    async with kube_api(tmp_path) as api:
        await api.put(gaie_pool())
        api.refuse["pods"] = 403
        async with seat(api, "--pool-name=qwen", "--pool-namespace=llm") as process:
            assert "kind=pods" in await line_with(process, "Kubernetes list or watch failed")


async def test_epp_names_its_own_option_for_a_port_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        async with kube_api(tmp_path) as api, seat(api, "--pool-name=qwen", f"--grpc-health-port={port}") as process:
            line = await line_with(process, "cannot listen")
            assert line.startswith(f"dualmap epp: cannot listen on 127.0.0.1:{port}: ")
            assert line.endswith("; give another --grpc-health-port")
            assert await asyncio.wait_for(process.wait(), WAIT_S) == 1


async def test_epp_without_its_kubeconfig_exits_with_a_reason(tmp_path: Path) -> None:
    process = await launch("--pool-name=qwen", command="epp", KUBECONFIG=str(tmp_path / "none"))
    _, said = await asyncio.wait_for(process.communicate(), WAIT_S)
    assert process.returncode == 2
    assert said.decode() == (
        f"dualmap epp: kubeconfig {tmp_path / 'none'} does not exist; set KUBECONFIG to an existing kubeconfig\n"
    )
