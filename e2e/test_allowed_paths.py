"""Which paths reach engines through the real Envoy, with a picker and while Envoy fails open."""

import dataclasses
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from dualmap_extproc import names
from dualmap_extproc.envoy.config.settings import Mode
from harness.clients import http1, raw
from harness.envoy import Envoy
from harness.picker import Picker, always
from harness.settings import pool_of, settings_for
from harness.upstream import Upstream

ADMINISTRATION = [
    "GET /",
    "GET /metrics",
    "GET /metrics?path=/v1/models",
    "GET /server_info",
    "GET /flush_cache",
    "POST /flush_cache",
    "POST /reset_prefix_cache",
    "POST /sleep?level=2",
    "POST /v1/load_lora_adapter",
    "POST /update_weights_from_disk",
    "POST /shutdown",
    "GET http://engine/metrics",
    "POST /v1/chat/completions/shutdown",
    "POST /v1/chat/completions/../../metrics",
    "POST /v1/chat/completions/%2e%2e/%2E./shutdown",
    "POST /v1/chat/completions/./..//../../shutdown",
    "GET /v1/models/../../metrics",
    "GET //metrics",
    "GET /METRICS",
    "POST /V1/chat/completions",
]
ESCAPED = [
    "POST /v1/chat/completions/..%2f..%2fmetrics",
    "GET /v1/models/..%5C..%5Cmetrics",
    "GET /v1/models/%2fmetrics",
]
REFUSED_METHODS = {
    "GET /v1/chat/completions": "POST, OPTIONS",
    "HEAD /v1/chat/completions": "POST, OPTIONS",
    "DELETE /v1/completions/render": "POST, OPTIONS",
    "TRACE /rerank": "POST, OPTIONS",
    "POST /v1/models": "GET, HEAD, OPTIONS",
    "DELETE /v1/models/org/name": "GET, HEAD, OPTIONS",
    "TRACE /v1/models/name": "GET, HEAD, OPTIONS",
    "PUT /v1/./models/name": "GET, HEAD, OPTIONS",
}
INFERENCE = {
    "POST /v1/chat/completions": "/v1/chat/completions",
    "POST /v1/chat/completions?next=/../../metrics": "/v1/chat/completions?next=/../../metrics",
    "POST /v1//chat/./completions": "/v1/chat/completions",
    "POST /shutdown/../v1/messages/count_tokens": "/v1/messages/count_tokens",
    "POST /rerank": "/rerank",
    "POST /v1/completions/render": "/v1/completions/render",
    "GET /v1/models": "/v1/models",
    "GET /v1/models/org/name": "/v1/models/org/name",
    "HEAD /v1/models": "/v1/models",
    "OPTIONS /v1/models": "/v1/models",
    "OPTIONS /v1/chat/completions": "/v1/chat/completions",
}

modes = pytest.mark.parametrize("mode", list(Mode), ids=lambda mode: mode.value)


@pytest_asyncio.fixture(name="engine")
async def _engine() -> AsyncIterator[Upstream]:
    async with Upstream(name="a") as engine:
        yield engine


async def send(envoy: Envoy, line: str) -> tuple[int, bytes]:
    """Send a request line as it stands, with a JSON body for a POST; return the status and the body of the answer."""
    body = json.dumps({"model": "qwen-model"}).encode() if line.startswith("POST") else b""
    head = f"{line} HTTP/1.1\r\nhost: e\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    answer = await raw(envoy.port, head.encode() + body)
    top, _, content = answer.partition(b"\r\n\r\n")
    return int(top.split()[1]), content


@modes
@pytest.mark.parametrize("picks", [True, False], ids=["picked", "failing open"])
async def test_only_inference_paths_reach_engines(mode: Mode, picks: bool, engine: Upstream, tmp_path: Path) -> None:
    async with Picker(choose=always(engine.endpoint, names.cluster_name("llm", "qwen"))) as picker:
        settings = dataclasses.replace(settings_for([pool_of([engine])], [picker], mode=mode), allow_paths=())
        if not picks:
            await picker.stop()
        async with Envoy(settings, directory=tmp_path) as envoy:
            for line in ADMINISTRATION:
                status, body = await send(envoy, line)
                assert status == 404, line
                assert json.loads(body)["error"]["code"] == "path_not_found", line
            for line in ESCAPED:
                status, body = await send(envoy, line)
                assert status == 400, line
                assert json.loads(body)["error"]["code"] == "invalid_request", line
            assert not engine.received
            assert not picker.streams, "the router is not called for other paths"
            for line, arrived in INFERENCE.items():
                assert (await send(envoy, line))[0] == 200, line
                assert engine.received[-1].path == arrived
            assert bool(picker.streams) == picks


@pytest.mark.parametrize("picks", [True, False], ids=["picked", "failing open"])
async def test_inference_paths_with_other_methods_get_405(picks: bool, engine: Upstream, tmp_path: Path) -> None:
    async with Picker(choose=always(engine.endpoint, names.cluster_name("llm", "qwen"))) as picker:
        settings = dataclasses.replace(settings_for([pool_of([engine])], [picker]), allow_paths=())
        if not picks:
            await picker.stop()
        async with Envoy(settings, directory=tmp_path) as envoy:
            for line, allowed in REFUSED_METHODS.items():
                method, _, path = line.partition(" ")
                reply = await http1(envoy.url + path, method=method)
                assert (reply.status, reply.headers.get("allow")) == (405, allowed), line
                if method != "HEAD":
                    assert json.loads(reply.body)["error"]["code"] == "method_not_allowed", line
            assert not engine.received
            assert not picker.streams, "the router is not called for other methods"


async def test_allowed_paths_add_to_the_inference_paths(engine: Upstream, tmp_path: Path) -> None:
    async with Picker(choose=always(engine.endpoint, names.cluster_name("llm", "qwen"))) as picker:
        base = settings_for([pool_of([engine])], [picker])
        added = dataclasses.replace(base, allow_paths=("/detokenize", "/a.b"))
        async with Envoy(added, directory=tmp_path, name="added") as envoy:
            statuses = [(await http1(envoy.url + path)).status for path in ("/detokenize", "/a.b", "/a-b", "/metrics")]
            assert statuses == [200, 200, 404, 404]
            assert (await http1(envoy.url + "/v1/models")).status == 200
        everything = dataclasses.replace(base, allow_paths=("*",))
        async with Envoy(everything, directory=tmp_path, name="everything") as envoy:
            assert (await http1(envoy.url + "/metrics")).status == 200
            assert (await send(envoy, "GET /v1/../metrics%2fx"))[0] == 400
