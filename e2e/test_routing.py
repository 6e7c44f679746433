"""Tests of routing through the real Envoy and router: picks, receipts, rejections, and ignored client headers."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from dualmap_extproc.envoy.config.settings import Mode
from harness.clients import http1, raw
from harness.deployment import CHAT, Deployment
from harness.documents import chat, error_of, prompt_of, receipt
from harness.shared_engines import SharedEngines
from harness.upstream import ENGINE_HEADER, Received, Upstream

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.always_picked]

DESTINATION = "x-gateway-destination-endpoint"
MODEL = "/v1/models/scripted-model"


async def test_next_turn_reuses_cached_prefix_at_same_engine(engines: SharedEngines, deployment: Deployment) -> None:
    names = {engine.name: engine.endpoint for engine in engines.fast}
    for conversation in range(4):
        body = chat("fast", prompt_of(8, seed=f"{deployment.mode} conversation {conversation}"), max_tokens=8)
        first = await deployment.ask(body)
        assert first.status == 200
        chosen = receipt(first)["chosen"]
        assert first.headers[ENGINE_HEADER] == names[chosen]
        assert receipt(first)["matched"] == "0"

        answer = json.loads(first.body)["choices"][0]["message"]
        body["messages"] += [answer, {"role": "user", "content": "And then?"}]
        second = await deployment.ask(body)
        assert second.headers[ENGINE_HEADER] == first.headers[ENGINE_HEADER]
        assert receipt(second)["rule"] == "pair-warm"
        assert int(receipt(second)["matched"]) >= 8 * 128
        usage = json.loads(second.body)["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= 8 * 128


async def test_receipt_contains_policy_pair_and_prompt_tokens(engines: SharedEngines, deployment: Deployment) -> None:
    reply = await deployment.ask(chat("scripted", prompt_of(4, seed=f"{deployment.mode} receipt")))
    said = receipt(reply)
    assert said["policy"] == "dualmap"
    assert set(said["pair"].strip("()").split()) == {'"left"', '"right"'}
    assert said["chosen"] == reply.headers[ENGINE_HEADER]
    assert int(said["prompt"]) >= 4 * 128
    assert 1 <= int(said["key"]) <= 4


async def test_engine_receipt_header_is_replaced(engines: SharedEngines, deployment: Deployment) -> None:
    async def forge(request: web.Request, received: Received) -> web.StreamResponse:
        return web.json_response({}, headers={"x-dualmap-decision": "forged"})

    engines.left.answer = engines.right.answer = forge
    body = json.dumps(chat("scripted")).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: e\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    answer = await raw(deployment.envoy.port, head + body)
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"forged" not in answer
    assert answer.count(b"x-dualmap-decision:") == 1


def spoofed(target: Upstream, cluster: str) -> dict[str, str]:
    """Return all headers that a client could use to choose its destination."""
    return {
        DESTINATION: target.endpoint,
        f"{DESTINATION}-served": target.endpoint,
        f"{DESTINATION}-subset": target.endpoint,
        "X-Gateway-Destination-Endpoint-Anything": target.endpoint,
        "x-dualmap-cluster": cluster,
        "x-dualmap-no-retry": "1",
        "x-dualmap-decision": "mine",
        "x-envoy-original-dst-host": target.endpoint,
        "x-envoy-upstream-rq-timeout-ms": "1",
    }


async def test_client_destination_headers_are_ignored(engines: SharedEngines, deployment: Deployment) -> None:
    prompt = prompt_of(4, seed=f"{deployment.mode} spoofed")
    first = await deployment.ask(chat("scripted", prompt))
    home = engines.left if first.headers[ENGINE_HEADER] == "left" else engines.right
    other = engines.right if home is engines.left else engines.left
    for target in (engines.outsider, other):
        reply = await deployment.ask(chat("scripted", prompt), headers=spoofed(target, "llm/slow"))
        assert reply.status == 200
        assert reply.headers[ENGINE_HEADER] == home.name
        assert receipt(reply)["chosen"] == home.name
        seen = home.received[-1].headers
        assert seen[DESTINATION].split(",")[0] == home.endpoint
        assert {name for name in seen if name.startswith(("x-dualmap", DESTINATION))} == {DESTINATION}
    assert not engines.outsider.received


async def test_bodiless_request_gets_any_member_and_no_receipt(engines: SharedEngines, deployment: Deployment) -> None:
    served = []
    for _ in range(4):
        reply = await http1(deployment.envoy.url + MODEL)
        assert reply.status == 200
        assert "x-dualmap-decision" not in reply.headers
        served.append(reply.headers[ENGINE_HEADER])
    assert set(served) == {"left", "right"}
    assert engines.left.received[-1].path == MODEL
    spoof = await http1(deployment.envoy.url + MODEL, headers=spoofed(engines.outsider, "llm/slow"))
    assert spoof.headers[ENGINE_HEADER] in {"left", "right"}


async def test_get_that_names_no_model_of_several_pools_gets_404(
    engines: SharedEngines, deployment: Deployment
) -> None:
    for path in ("/v1/models", "/v1/models/unheard-of"):
        reply = await http1(deployment.envoy.url + path)
        assert reply.status == 404
        assert error_of(reply)["code"] == "model_not_found"
    fast = await http1(deployment.envoy.url + "/v1/models/fast-model?x=1")
    assert fast.headers[ENGINE_HEADER] in {engine.endpoint for engine in engines.fast}


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"{", 400, "invalid_request"),
        (b"[1]", 400, "invalid_request"),
        (b"", 400, "invalid_request"),
        (b'{"messages": []}', 400, "invalid_request"),
        (b'{"model": 7}', 400, "invalid_request"),
        (json.dumps(chat("unheard-of")).encode(), 404, "model_not_found"),
        (json.dumps(chat("empty")).encode(), 503, "no_endpoint"),
    ],
    ids=["not JSON", "no object", "no body", "no model", "model is a number", "unknown model", "empty pool"],
)
async def test_rejected_request_gets_openai_error(deployment: Deployment, body: bytes, status: int, code: str) -> None:
    for chunk_bytes in (0, 3):
        reply = await deployment.ask(body, chunk_bytes=chunk_bytes)
        assert reply.status == status
        assert error_of(reply)["code"] == code
        assert "x-dualmap-decision" not in reply.headers


async def test_model_name_or_alias_selects_its_pool(engines: SharedEngines, deployment: Deployment) -> None:
    scripted = await deployment.ask(chat("scripted") | {"model": "scripted"})
    assert scripted.status == 200
    assert scripted.headers[ENGINE_HEADER] in {"left", "right"}
    fast = await deployment.ask(chat("fast", max_tokens=2))
    assert fast.headers[ENGINE_HEADER] in {engine.endpoint for engine in engines.fast}
    fast = await deployment.ask(chat("slow", max_tokens=1))
    assert fast.headers[ENGINE_HEADER] == engines.slow.endpoint


def with_subset(config: str) -> str:
    """Add a filter that sets a gateway's subset hint from the header ``x-test-subset``."""
    document: dict[str, Any] = yaml.safe_load(config)
    (listener,) = document["static_resources"]["listeners"]
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    rule = {
        "header": "x-test-subset",
        "on_header_present": {"metadata_namespace": "envoy.lb.subset_hint", "key": f"{DESTINATION}-subset"},
    }
    config_type = "type.googleapis.com/envoy.extensions.filters.http.header_to_metadata.v3.Config"
    hint = {
        "name": "test.subset",
        "typed_config": {"@type": config_type, "request_rules": [rule]},
    }
    manager["http_filters"].insert(0, hint)
    return yaml.safe_dump(document)


async def test_gateway_subset_hint_limits_the_candidates(engines: SharedEngines, deployment: Deployment) -> None:
    async with deployment.another_envoy("subset", edit=with_subset) as envoy:
        for number in range(4):
            for member in (engines.left, engines.right):
                body = chat("scripted", prompt_of(2, seed=f"subset {number}"))
                reply = await deployment.ask(body, headers={"x-test-subset": member.endpoint}, envoy=envoy)
                assert reply.headers[ENGINE_HEADER] == member.name
                assert receipt(reply)["pair"] == f'("{member.name}")'
        headers = {"x-test-subset": engines.right.endpoint}
        assert (await http1(envoy.url + MODEL, headers=headers)).headers[ENGINE_HEADER] == "right"
        by_ip = await deployment.ask(chat("scripted"), headers={"x-test-subset": "127.0.0.1"}, envoy=envoy)
        assert receipt(by_ip)["pair"].count('"') == 4
        for headers in ({"x-test-subset": engines.outsider.endpoint}, {"x-test-subset": ","}):
            for refused in (
                await deployment.ask(chat("scripted"), headers=headers, envoy=envoy),
                await http1(envoy.url + MODEL, headers=headers),
            ):
                assert refused.status == 503
                assert error_of(refused)["code"] == "no_endpoint"
    assert not engines.outsider.received


async def test_request_over_tls_is_routed_and_logged(engines: SharedEngines, tmp_path: Path) -> None:
    documents = {"fast": engines.documents()["fast"]}
    async with Deployment(documents, mode=Mode.STREAMED, directory=tmp_path, tls=True) as deployment:
        reply = await deployment.ask(chat("fast", max_tokens=2))
        assert reply.status == 200
        assert receipt(reply)["chosen"] in {engine.name for engine in engines.fast}
        models = json.loads((await http1(deployment.envoy.url + "/v1/models")).body)
        assert [model["id"] for model in models["data"]] == ["fast-model"]
        await deployment.wait_for_rest()
        await deployment.wait_for_metric("dualmap_completions_total", 1, outcome="finished")
        await deployment.wait_for_metric("dualmap_access_log_entries_total", 1, picked="yes")
        answer = await raw(deployment.router.ports["grpc"], b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9))
        assert not answer.startswith(b"\x00"), "the router answers HTTP/2 in plain text on its TLS port"
