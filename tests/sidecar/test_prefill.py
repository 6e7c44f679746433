"""The two legs of a request whose prompt another engine prefills."""

import asyncio
import json
import socket
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from dualmap_sidecar.settings import KvConnector, Limits
from sidecar_site import PARAMETERS, Answering, Site, cut, decoded, prefilled, silent, site, with_status

ASKS_FOR_REMOTE_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


async def where(made: Site, headers: dict[str, str], **body: Any) -> str:
    """Send a completion; return where its prompt was prefilled, after a check that the client got its answer."""
    response = await made.complete(headers, **body)
    assert response.status == 200
    assert await response.json() == {"id": "cmpl-1", "choices": [{"text": " the fox"}]}
    found: str = response.headers["x-dualmap-prefill"]
    assert made.count("dualmap_pd_prefills_total", where=found) >= 1
    return found


async def test_prefill_leg_is_the_request_with_one_token() -> None:
    async with site(prefilled) as made:
        body = {"stream": True, "stream_options": {"include_usage": True}, "min_tokens": 4, "temperature": 0.5}
        assert await where(made, made.naming(0), **body) == "remote"
        (received,) = made.prefillers[0].received
        assert received.path == "/v1/completions"
        assert received.json == {
            "model": "qwen",
            "prompt": "hello",
            "max_tokens": 1,
            "stream": False,
            "temperature": 0.5,
            "kv_transfer_params": ASKS_FOR_REMOTE_DECODE,
        }


async def test_prefill_leg_of_a_chat_limits_completion_tokens() -> None:
    async with site(prefilled) as made:
        body = {"model": "qwen", "messages": [], "max_completion_tokens": 50}
        async with made.client.post(f"{made.url}/v1/chat/completions", json=body, headers=made.naming(0)):
            pass
        (received,) = made.prefillers[0].received
        assert received.json["max_tokens"] == received.json["max_completion_tokens"] == 1


async def test_decode_leg_is_the_request_with_the_prefillers_parameters() -> None:
    async with site(prefilled) as made:
        assert await where(made, made.naming(0), stream=True, seed=7) == "remote"
        (received,) = made.engine.received
        sent = {"model": "qwen", "prompt": "hello", "max_tokens": 8, "stream": True, "seed": 7}
        assert received.json == {**sent, "kv_transfer_params": PARAMETERS}
        assert list(received.json) == [*sent, "kv_transfer_params"]


async def test_both_legs_have_the_clients_headers_and_request_id() -> None:
    async with site(prefilled) as made:
        headers = {"Authorization": "Bearer key", "X-Request-Id": "r-1", "x-data-parallel-rank": "3", "X-Own": "a"}
        await where(made, {**made.naming(0), **headers})
        await where(made, made.naming(0))
        for received in (made.prefillers[0].received[0], made.engine.received[0]):
            assert received.headers["Authorization"] == "Bearer key"
            assert received.headers["X-Request-Id"] == "r-1"
            assert received.headers["X-Own"] == "a"
            assert not [name for name in received.headers if name.lower().startswith(("x-prefiller", "x-dualmap"))]
        assert "x-data-parallel-rank" not in made.prefillers[0].received[0].headers
        assert made.engine.received[0].headers["x-data-parallel-rank"] == "3"
        ids = {made.prefillers[0].received[1].headers["X-Request-Id"], made.engine.received[1].headers["X-Request-Id"]}
        assert len(ids) == 1
        assert "" not in ids


async def test_header_of_llm_d_alone_names_the_prefiller() -> None:
    async with site(prefilled) as made:
        assert await where(made, {"x-prefiller-host-port": made.prefillers[0].endpoint}) == "remote"


@pytest.mark.parametrize(
    ("fails", "reason"),
    [
        (with_status(429), "full"),
        (with_status(503), "full"),
        (with_status(500), "error"),
        (with_status(502), "error"),
        (with_status(401), "error"),
        (with_status(403), "error"),
        (with_status(404), "error"),
        (with_status(307), "error"),
        (with_status(200), "no_parameters"),
        (with_status(200, b'{"kv_transfer_params": null}'), "no_parameters"),
        (with_status(200, b'{"kv_transfer_params": {}}'), "no_parameters"),
        (with_status(200, b'{"kv_transfer_params": "x"}'), "no_parameters"),
        (with_status(200, b"no JSON"), "no_parameters"),
        (with_status(200, b"{" + b" " * 5000 + b"}"), "error"),
        (cut, "cut"),
    ],
)
async def test_failed_prefill_goes_to_the_next_and_then_to_the_engine(fails: Answering, reason: str) -> None:
    async with site(fails, prefilled, fails, limits=Limits(answer_bytes=5000)) as made:
        assert await where(made, made.naming(0, 1)) == "next"
        assert made.engine.received[-1].json["kv_transfer_params"] == PARAMETERS
        assert await where(made, made.naming(0, 2)) == "local"
        assert "kv_transfer_params" not in made.engine.received[-1].json
        assert made.count("dualmap_pd_prefill_failures_total", reason=reason) == 3


async def test_shared_storage_needs_no_parameters_in_either_leg() -> None:
    async with site(with_status(200), kv_connector=KvConnector.SHARED_STORAGE) as made:
        assert await where(made, made.naming(0), stream=True, kv_transfer_params={"remote_host": "evil"}) == "remote"
        sent = {"model": "qwen", "prompt": "hello"}
        assert made.prefillers[0].received[0].json == {**sent, "max_tokens": 1, "stream": False}
        assert made.engine.received[0].json == {**sent, "max_tokens": 8, "stream": True}
        assert made.count("dualmap_pd_prefill_failures_total", reason="no_parameters") == 0


async def test_shared_storage_without_a_prefiller_that_works_is_a_local_prefill() -> None:
    async with site(with_status(503), with_status(200), kv_connector=KvConnector.SHARED_STORAGE) as made:
        assert await where(made, made.naming(0, 1)) == "next"
        assert await where(made, made.naming(0)) == "local"


async def test_shared_storage_passes_the_prefillers_rejection_to_the_client() -> None:
    async with site(with_status(400, b'{"error": "bad"}'), kv_connector=KvConnector.SHARED_STORAGE) as made:
        response = await made.complete(made.naming(0))
        assert (response.status, await response.read()) == (400, b'{"error": "bad"}')
        assert not made.engine.received


async def test_killed_prefiller_is_replaced_in_the_middle_of_its_prefill() -> None:
    async with site(silent, prefilled) as made:
        asked = asyncio.create_task(where(made, made.naming(0, 1)))
        await made.prefillers[0].arrived.wait()
        await made.prefillers[0].stop()
        assert await asked == "next"
        assert made.count("dualmap_pd_prefill_failures_total", reason="cut") == 1
        assert await where(made, made.naming(0, 1)) == "next"
        assert made.count("dualmap_pd_prefill_failures_total", reason="unreachable") == 1
        await made.prefillers[0].start()
        made.prefillers[0].answering = prefilled
        assert await where(made, made.naming(0, 1)) == "remote"


async def test_prefiller_that_hangs_is_left_and_then_not_asked_for_a_while() -> None:
    async with site(silent, prefilled, prefill_timeout_s=2.0) as made:
        assert await where(made, made.naming(0, 1)) == "next"
        await made.prefillers[0].cancelled.wait()
        assert await where(made, made.naming(0, 1)) == "next"
        assert len(made.prefillers[0].received) == 1
        assert made.count("dualmap_pd_prefill_failures_total", reason="paused") == 1


async def test_prefiller_that_hung_is_asked_again_after_the_pause() -> None:
    async with site(silent, prefilled, prefill_timeout_s=2.0, limits=Limits(pause_s=0.0)) as made:
        assert await where(made, made.naming(0, 1)) == "next"
        made.prefillers[0].answering = prefilled
        assert await where(made, made.naming(0, 1)) == "remote"


async def test_all_prefillers_gone_leave_the_prompt_to_the_engine() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        gone = f"127.0.0.1:{free.getsockname()[1]}"
        async with site() as made:
            assert await where(made, {"x-prefiller-host-port": gone, "x-dualmap-prefillers": gone}) == "local"


@pytest.mark.parametrize("status", [400, 413, 422])
async def test_prefillers_rejection_goes_to_the_client(status: int) -> None:
    async with site(with_status(status, b'{"error": "wrong"}'), prefilled) as made:
        response = await made.complete(made.naming(0, 1))
        assert (response.status, await response.read()) == (status, b'{"error": "wrong"}')
        assert response.headers["x-from"] == "prefiller"
        assert response.headers["x-dualmap-prefill"] == "remote"
        assert not made.engine.received
        assert not made.prefillers[1].received


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"x-prefiller-host-port": ""},
        {"x-prefiller-host-port": "169.254.169.254:80"},
        {"x-prefiller-host-port": "localhost:80", "x-dualmap-prefillers": "http://10.0.0.1:80,,user@10.0.0.1:80"},
    ],
)
async def test_request_without_an_allowed_prefiller_passes(headers: dict[str, str]) -> None:
    async with site(prefilled) as made:
        assert await where(made, headers) == "none"
        (received,) = made.engine.received
        assert received.json == {"model": "qwen", "prompt": "hello", "max_tokens": 8}


async def test_forged_prefiller_is_counted_and_gets_no_request() -> None:
    async with site(prefilled, allow=["10.0.0.0/8"]) as made:
        assert await where(made, made.naming(0)) == "none"
        assert not made.prefillers[0].received
        assert made.count("dualmap_pd_prefill_failures_total", reason="refused_target") == 2


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/invocations"])
@pytest.mark.parametrize("name", ["kv_transfer_params", "return_token_ids"])
async def test_client_cannot_say_from_where_the_engine_pulls(path: str, name: str) -> None:
    async with site() as made:
        spelled = name.replace("_", "\\u005f")
        body = f'{{"model": "qwen", "{name}": {{"remote_host": "evil"}}, "{spelled}": 1, "prompt": "x"}}'
        for encoded in (body.encode(), body.encode("utf-16")):
            async with made.client.post(f"{made.url}{path}", data=encoded):
                pass
            assert made.engine.received[-1].json == {"model": "qwen", "prompt": "x"}


async def test_client_cannot_hide_its_parameters_behind_those_of_the_prefiller() -> None:
    async with site(prefilled) as made:
        assert await where(made, made.naming(0), kv_transfer_params={"remote_host": "evil"}) == "remote"
        assert made.prefillers[0].received[0].json["kv_transfer_params"] == ASKS_FOR_REMOTE_DECODE
        assert made.engine.received[0].json["kv_transfer_params"] == PARAMETERS


async def test_other_paths_are_not_prefilled() -> None:
    async with site(prefilled) as made:
        async with made.client.post(f"{made.url}/v1/embeddings", json={"input": "x"}, headers=made.naming(0)) as answer:
            assert "x-dualmap-prefill" not in answer.headers
        assert not made.prefillers[0].received


async def only_a_head(request: web.BaseRequest) -> web.StreamResponse:
    """Send the head of a stream, and no token."""
    await web.StreamResponse().prepare(request)
    return await silent(request)


@pytest.mark.parametrize("leg", ["prefill", "decode", "decode, after its head"])
async def test_client_that_goes_away_ends_its_leg(leg: str) -> None:
    prefiller = silent if leg == "prefill" else prefilled
    async with site(prefiller, engine=silent if leg == "decode" else only_a_head) as made:
        ends = made.prefillers[0] if leg == "prefill" else made.engine
        asked = asyncio.create_task(made.complete(made.naming(0)))
        await ends.arrived.wait()
        asked.cancel()
        await ends.cancelled.wait()
        assert leg != "prefill" or not made.engine.received


def first_fails(failure: Answering) -> Answering:
    """Return an answer that is a failure for requests with KV from a prefiller."""
    asked: list[int] = []

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        asked.append(1)
        return await (failure if len(asked) == 1 else decoded)(request)

    return answer


async def failed_stream(request: web.BaseRequest) -> web.StreamResponse:
    """Answer as a vLLM that could not load KV in a stream."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    error = {"error": {"message": "Internal server error", "type": "InternalServerError", "code": 500}}
    await response.write(b"data: " + json.dumps(error).encode() + b"\n\ndata: [DONE]\n\n")
    return response


@pytest.mark.parametrize("failure", [with_status(500), failed_stream])
async def test_kv_that_the_engine_cannot_load_is_computed_there(failure: Answering) -> None:
    async with site(prefilled, engine=first_fails(failure)) as made:
        assert await where(made, made.naming(0)) == "local"
        first, second = made.engine.received
        assert first.json["kv_transfer_params"] == PARAMETERS
        assert "kv_transfer_params" not in second.json
        assert made.count("dualmap_pd_prefill_failures_total", reason="not_loaded") == 1


async def test_parameters_pass_in_the_same_bytes() -> None:
    raw = b'{"do_remote_prefill" : true,"block":[1 ,2],"f":1.0e2,"t":"\\u00e9"}'

    async def answer(_request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(body=b'{"choices":[],"kv_transfer_params":' + raw + b"}", content_type="application/json")

    async with site(answer) as made:
        assert await where(made, made.naming(0)) == "remote"
        assert b'"kv_transfer_params":' + raw in made.engine.received[0].body


async def test_engines_own_prefill_header_is_replaced() -> None:
    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        response = await decoded(request)
        response.headers["x-dualmap-prefill"] = "forged"
        return response

    async with site(prefilled, engine=answer) as made:
        response: aiohttp.ClientResponse = await made.complete(made.naming(0))
        assert response.headers.getall("x-dualmap-prefill") == ["remote"]
