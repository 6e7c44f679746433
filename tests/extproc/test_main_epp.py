"""``dualmap epp`` as a process, with the arguments of other pickers' charts, on the tests' Kubernetes API."""

import asyncio
import contextlib
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from dualmap_extproc.names import PREFILLER_HEADER
from dualmap_extproc.transport.tls import self_signed
from dualmap_extproc.wire import ext_proc_pb2 as wire
from extproc.envoy_messages import (
    DUPLEX,
    chat,
    destination,
    headers_set,
    kinds,
    refused_with,
    request_body,
    request_headers,
)
from extproc.router_processes import WAIT_S, Router, launch, stream
from extproc.test_main_kube import line_with
from extproc.test_pools_gaie import gaie_pool, objective, pod_of
from kube_api import KubeApi, kube_api, pod_body, write_kubeconfig
from ports import reserved_port
from waiting import until

READY = re.compile(r"dualmap epp ready grpc=(\S+) health=(\S+) metrics=(\S+) als=(\S+)$")
PODS = "/api/v1/namespaces/llm/pods?serving.dualmap.dev/pool=qwen"
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

# llm-d's plugins for prefill and decode on different pods.
PREFILLS = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- {type: prefix-cache-scorer}
- {type: prefill-filter}
- {type: decode-filter}
- {type: prefix-based-pd-decider, parameters: {nonCachedTokens: 64}}
- {type: disagg-profile-handler, parameters: {deciders: {prefill: prefix-based-pd-decider}}}
schedulingProfiles:
- {name: prefill, plugins: [{pluginRef: prefill-filter}, {pluginRef: prefix-cache-scorer, weight: 2}]}
- {name: decode, plugins: [{pluginRef: decode-filter}, {pluginRef: prefix-cache-scorer, weight: 2}]}
"""


@asynccontextmanager
async def seat(api: KubeApi, *arguments: str, **environment: str) -> AsyncIterator[asyncio.subprocess.Process]:
    ports = [f"--{port}-port=0" for port in ("grpc", "grpc-health", "metrics", "als")]
    environment |= {"KUBECONFIG": str(api.kubeconfig)}
    process = await launch("--host=127.0.0.1", *ports, *arguments, command="epp", **environment)
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


async def health(address: str, service: str) -> int:
    async with grpc.aio.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        return (await health_pb2_grpc.HealthStub(channel).Check(request)).status


async def answered(channel: grpc.aio.Channel, body: bytes) -> wire.ProcessingResponse:
    """Return the first answer to a request in the gateways' mode."""
    call = stream(channel)
    await call.write(request_headers(DUPLEX))
    # A router that refuses the request by its headers ends the call. If a write fails then, a later read fails as well.
    reading = asyncio.create_task(call.read())
    with contextlib.suppress(grpc.RpcError):
        await call.write(request_body(body))
    async with asyncio.timeout(WAIT_S):
        answer: wire.ProcessingResponse = await reading
    call.cancel()
    return answer


async def picked(channel: grpc.aio.Channel, body: bytes) -> str | None:
    return destination(await answered(channel, body))


async def picked_in_unknown_modes(channel: grpc.aio.Channel, body: bytes) -> str | None:
    """Return the pick for a gateway with modes that no Envoy has, which waits for the answer to each message."""
    call = stream(channel)
    modes = wire.ProtocolConfiguration(request_body_mode=77, response_body_mode=78)  # type: ignore[arg-type]
    async with asyncio.timeout(WAIT_S):
        await call.write(request_headers(modes))
        assert kinds([await call.read()]) == ["request_headers"]
        await call.write(request_body(body))
        answer = await call.read()
    call.cancel()
    assert kinds([answer]) == ["request_body"]
    return destination(answer)


@pytest.mark.usefixtures("transport")
async def test_epp_with_the_arguments_of_a_chart_serves_the_pool(tmp_path: Path) -> None:
    config = tmp_path / "default-plugins.yaml"
    config.write_text(CONFIG)
    async with kube_api(tmp_path) as api:
        for body in (pod_body("qwen-0"), objective("batch", -1)):
            await api.put(body)
        # The ready line, which names the ports, comes later.
        port, grpc_port = reserved_port(), reserved_port()
        ports = f"--grpc-health-port={port}", f"--grpc-port={grpc_port}"
        async with seat(api, *CHART, "--config-file", str(config), "--secure-serving=false", *ports) as process:
            assert '"flags": ["--total-queued-requests-metric"]' in await line_with(process, "Flags have no effect")
            assert "queue-scorer" in await line_with(process, "Plugins have no effect")
            assert '"label": "llm-d.ai/role"' in await line_with(process, "Respecting the roles of pods")
            await line_with(process, "Waiting for the pool, which does not exist")
            assert await health(f"127.0.0.1:{port}", "readiness") == health_pb2.HealthCheckResponse.NOT_SERVING
            assert await health(f"127.0.0.1:{port}", "liveness") == health_pb2.HealthCheckResponse.SERVING
            async with grpc.aio.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
                assert refused_with([await answered(channel, chat())]) == 503
            await api.put(gaie_pool())
            router = await ready(process)
            for service in ("", "liveness", "readiness", "inference-extension"):
                assert await health(router.health, service) == health_pb2.HealthCheckResponse.SERVING
            async with grpc.aio.insecure_channel(router.grpc) as channel:
                assert await picked(channel, chat(model="any/name")) == "10.244.0.1:8000"
                assert await picked_in_unknown_modes(channel, chat()) == "10.244.0.1:8000"
                await api.delete(gaie_pool())
                await line_with(process, "Reloaded pool")
                assert refused_with([await answered(channel, chat())]) == 503
                await api.put(gaie_pool())
                await line_with(process, "Reloaded pool")
                assert await picked(channel, chat()) == "10.244.0.1:8000"
            assert b"dualmap_picks_not_followed_total" in await router.get("/metrics")
            router.stop()
            assert await router.exited() == 0


async def test_epp_with_llm_ds_plugins_for_prefill_names_a_pod_of_each_role(tmp_path: Path) -> None:
    config = tmp_path / "pd-epp-config.yaml"
    config.write_text(PREFILLS)
    async with kube_api(tmp_path) as api:
        for body in (gaie_pool(), pod_of("decode", "qwen-0"), pod_of("prefill", "qwen-1")):
            await api.put(body)
        arguments = "--pool-name=qwen", "--pool-namespace=llm", f"--config-file={config}", "--secure-serving=false"
        async with seat(api, *arguments) as process:
            router = await ready(process)
            async with grpc.aio.insecure_channel(router.grpc) as channel:
                long = await answered(channel, chat("story " * 400))
                assert destination(long) == "10.244.0.1:8000"
                assert headers_set(long)[PREFILLER_HEADER] == "10.244.0.2:8000"
                short = await answered(channel, chat("Hi"))
                assert destination(short) == "10.244.0.1:8000"
                assert PREFILLER_HEADER not in headers_set(short)
            assert b'dualmap_prefills_total{pool="llm/qwen",where="remote"} 1.0' in await router.get("/metrics")


@pytest.mark.usefixtures("transport")
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
        async with seat(api, "--pool-name=qwen", NAMESPACE="llm") as process:
            line = await line_with(process, "Kubernetes list or watch failed")
            assert "kind=pods" in line
            assert 'cannot list resource "pods"' in line.replace("\\", "")
            await until(lambda: api.lists.count(PODS) > 1)
            del api.refuse["pods"]
            # The next warning would be another line about the same refusal.
            assert "Kubernetes watch recovered" in await line_with(process, "Kubernetes")
            await ready(process)


async def test_epp_names_its_own_option_for_a_port_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        async with kube_api(tmp_path) as api, seat(api, "--pool-name=qwen", f"--grpc-health-port={port}") as process:
            line = await line_with(process, "cannot listen")
            assert line.startswith(f"dualmap epp: cannot listen on 127.0.0.1:{port}: ")
            assert line.endswith("; give another --grpc-health-port")
            assert await asyncio.wait_for(process.wait(), WAIT_S) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--shiny"], "Error: no such flag: '--shiny'; accepted: --als-port, "),
        (
            ["--config-text", CONFIG.replace("decode-", "shiny-")],
            "'shiny-filter' is not accepted; give a plugin of these: ",
        ),
        (["--kubeconfig=/nope"], "Error: --kubeconfig /nope: No such file or directory; give an existing kubeconfig"),
        (["--cert-path=/nope"], "Error: --cert-path /nope: tls.crt: No such file or directory; give a folder with "),
        ([], "dualmap epp: kubeconfig {0}/none does not exist; set KUBECONFIG to an existing kubeconfig"),
        (["--kubeconfig={0}/broken"], "dualmap epp: --kubeconfig: kubeconfig {0}/broken is invalid: "),
        (
            ["--kubeconfig={0}/kubeconfig", "--cert-path={0}"],
            "dualmap epp: --cert-path: tls.key is not the key of tls.c",
        ),
    ],
    ids=["flag", "plugin", "kubeconfig", "cert-path", "KUBECONFIG", "broken kubeconfig", "other key"],
)
async def test_epp_with_invalid_arguments_exits_with_a_reason(tmp_path: Path, arguments: list[str], said: str) -> None:
    (tmp_path / "broken").write_text("- no\n- mapping")
    write_kubeconfig(tmp_path / "kubeconfig", "http://127.0.0.1:1")
    (tmp_path / "tls.key").write_bytes(self_signed()[0])
    (tmp_path / "tls.crt").write_bytes(self_signed()[1])
    given = [each.replace("{0}", str(tmp_path)) for each in arguments]
    process = await launch("--pool-name=qwen", *given, command="epp", KUBECONFIG=str(tmp_path / "none"))
    _, written = await asyncio.wait_for(process.communicate(), WAIT_S)
    assert process.returncode == 2
    *usage, line = written.decode().splitlines()
    assert said.replace("{0}", str(tmp_path)) in line
    assert all(each.startswith(("Usage: ", "Try ")) for each in usage if each)
