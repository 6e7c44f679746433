"""Tests of the generated configuration in the real Envoy, with a scripted picker instead of the router.

Each test covers a configuration line that Envoy 1.40 needs to handle requests correctly.
"""

import asyncio
import dataclasses
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web

from dualmap_extproc import names
from dualmap_extproc.envoy.config.settings import Address, Mode
from harness.clients import Reply, http1, http2, raw, sha256
from harness.envoy import Envoy
from harness.picker import Pick, Picker, Seen, always
from harness.settings import pool_of, settings_for
from harness.upstream import DIGEST_HEADER, ENGINE_HEADER, Received, Upstream, sse
from harness.waiting import until
from ports import reserved_port

SIZES = [2, 70_000, 12_000_000]
USAGE = {"prompt_tokens": 10, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 8}}
USAGE_TAGS = {"prompt_tokens": "10", "completion_tokens": "3", "cached_tokens": "8"}
FIRST, SECOND = names.cluster_name("llm", "first"), names.cluster_name("llm", "second")

modes = pytest.mark.parametrize("mode", list(Mode), ids=lambda mode: mode.value)


def body_of(size: int) -> bytes:
    return random.Random(size).randbytes(size)


def assert_served(reply: Reply, engine: Upstream, body: bytes) -> None:
    assert reply.status == 200, reply.body[:200]
    assert reply.headers[ENGINE_HEADER] == engine.name
    assert reply.headers[DIGEST_HEADER] == sha256(body)


def assert_refused(reply: Reply, status: int, code: str) -> None:
    assert reply.status == status, reply
    assert reply.headers["content-type"] == "application/json"
    error = json.loads(reply.body)["error"]
    assert error["code"] == code
    assert error["message"]


@pytest_asyncio.fixture(name="engines")
async def _engines() -> AsyncIterator[list[Upstream]]:
    async with Upstream(name="a") as a, Upstream(name="b") as b, Upstream(name="c") as c:
        yield [a, b, c]


@pytest_asyncio.fixture(name="dead")
async def _dead() -> Upstream:
    """Return an address where nothing listens."""
    async with Upstream(name="dead") as engine:
        pass
    return engine


@pytest_asyncio.fixture(name="picker")
async def _picker(engines: list[Upstream]) -> AsyncIterator[Picker]:
    async with Picker(choose=always(engines[2].endpoint, SECOND)) as picker:
        yield picker


@pytest_asyncio.fixture(name="no_picker")
async def _no_picker() -> Picker:
    """Return the address of a picker that has stopped."""
    async with Picker(choose=always("", "")) as picker:
        pass
    return picker


@modes
async def test_pick_selects_pool_and_engine_without_changing_body(
    mode: Mode, engines: list[Upstream], picker: Picker, dead: Upstream, tmp_path: Path
) -> None:
    a, b, c = engines
    pools = [pool_of([a], name="first"), pool_of([b, c, dead], name="second")]
    async with Envoy(settings_for(pools, [picker], mode=mode), directory=tmp_path, concurrency=2) as envoy:
        assert_served(await http1(envoy.url), c, b"")
        for destination in (c.endpoint, f"{dead.endpoint},{c.endpoint}"):
            picker.choose = always(destination, SECOND)
            for body in map(body_of, SIZES):
                assert_served(await http1(envoy.url, body=body), c, body)
                assert picker.streams[-1].served == c.endpoint
                assert_served(await http1(envoy.url, body=body, chunk_bytes=65_536), c, body)
                assert_served(await http2(envoy.port, path="/", body=body), c, body)


@modes
async def test_body_before_http2_trailers_is_forwarded_once(
    mode: Mode, engines: list[Upstream], picker: Picker, tmp_path: Path
) -> None:
    pools = [pool_of(engines[:1], name="first"), pool_of(engines[1:], name="second")]
    async with Envoy(settings_for(pools, [picker], mode=mode), directory=tmp_path) as envoy:
        for body in map(body_of, SIZES):
            length = {"content-length": str(len(body))}
            reply = await http2(envoy.port, path="/", body=body, headers=length, trailers=[("x-sum", "1")])
            assert_served(reply, engines[2], body)


@modes
async def test_picker_outage_uses_the_only_pool_and_ignores_client_headers(
    mode: Mode, engines: list[Upstream], no_picker: Picker, tmp_path: Path
) -> None:
    pools = [pool_of(engines[:1], name="first")]
    made_up = {
        names.DESTINATION_HEADER: engines[2].endpoint,
        names.CLUSTER_HEADER: SECOND,
        names.DECISION_HEADER: "made up",
        "x-envoy-retry-on": "5xx",
    }
    async with Envoy(settings_for(pools, [no_picker], mode=mode), directory=tmp_path) as envoy:
        for body in map(body_of, SIZES):
            assert_served(await http1(envoy.url, body=body, headers=made_up), engines[0], body)
            assert_served(await http1(envoy.url, body=body, chunk_bytes=65_536), engines[0], body)
            assert_served(await http2(envoy.port, path="/", body=body, trailers=[("x-sum", "1")]), engines[0], body)
    for received in engines[0].received:
        assert not set(made_up) & set(received.headers)


@modes
async def test_picker_outage_with_several_pools_gets_503(
    mode: Mode, engines: list[Upstream], no_picker: Picker, tmp_path: Path
) -> None:
    pools = [pool_of(engines[:1], name="first"), pool_of(engines[1:], name="second")]
    made_up = {names.DESTINATION_HEADER: engines[0].endpoint, names.CLUSTER_HEADER: SECOND}
    async with Envoy(settings_for(pools, [no_picker], mode=mode), directory=tmp_path) as envoy:
        for body in map(body_of, SIZES):
            assert_refused(await http1(envoy.url, body=body, headers=made_up), 503, "router_unreachable")
    assert not any(engine.received for engine in engines)


@pytest.mark.parametrize("mode", [Mode.STREAMED, Mode.BUFFERED], ids=lambda mode: mode.value)
async def test_picker_stop_mid_request_keeps_body_complete(
    mode: Mode, engines: list[Upstream], picker: Picker, tmp_path: Path
) -> None:
    body = body_of(SIZES[-1])
    settings = settings_for([pool_of(engines[:1], name="first")], [picker], mode=mode)
    async with Envoy(settings, directory=tmp_path) as envoy:
        for chunk_bytes in (0, 65_536, 0, 65_536):
            held = asyncio.Event()

            async def hold(seen: Seen, held: asyncio.Event = held) -> Pick:
                held.set()
                return await asyncio.Future()

            async def asked_again() -> bool:
                before = len(picker.streams)
                await http1(envoy.url)
                return len(picker.streams) > before

            picker.choose = always(engines[0].endpoint, FIRST)
            await picker.start()
            await until(asked_again, "Envoy uses the picker again")
            picker.choose = hold
            waiting = asyncio.create_task(http1(envoy.url, body=body, chunk_bytes=chunk_bytes))
            await asyncio.wait_for(held.wait(), 10.0)
            await picker.stop()
            assert_served(await waiting, engines[0], body)
            for _ in range(3):
                assert_served(await http1(envoy.url, body=body, chunk_bytes=chunk_bytes), engines[0], body)


async def test_failed_concurrent_requests_retry_at_second_candidate(
    engines: list[Upstream], picker: Picker, dead: Upstream, tmp_path: Path
) -> None:
    picker.choose = always(f"{dead.endpoint},{engines[0].endpoint}", FIRST)
    settings = settings_for([pool_of([engines[0], dead], name="first")], [picker])
    async with Envoy(settings, directory=tmp_path) as envoy:
        replies = await asyncio.gather(*(http1(envoy.url, body=b"{}") for _ in range(50)))
    assert [reply.status for reply in replies] == [200] * 50


@modes
async def test_oversized_body_gets_413_as_openai_error(
    mode: Mode, engines: list[Upstream], picker: Picker, tmp_path: Path
) -> None:
    settings = settings_for([pool_of(engines, name="first")], [picker], mode=mode)
    async with Envoy(settings, directory=tmp_path) as envoy:
        for chunk_bytes in (0, 65_536):
            reply = await http1(envoy.url, body=bytes(40_000_000), chunk_bytes=chunk_bytes)
            assert reply.status == 413
            assert "message" in json.loads(reply.body)["error"]
    assert not any(engine.received for engine in engines)


@modes
async def test_pick_of_pool_unknown_to_envoy_gets_503(
    mode: Mode, engines: list[Upstream], picker: Picker, tmp_path: Path
) -> None:
    picker.choose = always(engines[0].endpoint, names.cluster_name("llm", "added-later"))
    async with Envoy(settings_for([pool_of(engines, name="first")], [picker], mode=mode), directory=tmp_path) as envoy:
        for reply in (await http1(envoy.url), *[await http1(envoy.url, body=body_of(size)) for size in SIZES]):
            assert_refused(reply, 503, "pool_not_configured")
    assert not any(engine.received for engine in engines)


@modes
async def test_request_to_unreachable_pool_gets_openai_error(
    mode: Mode, dead: Upstream, picker: Picker, tmp_path: Path
) -> None:
    pools = [pool_of([dead], name="first"), pool_of([], name="second")]
    async with Envoy(settings_for(pools, [picker], mode=mode), directory=tmp_path) as envoy:
        for cluster in (FIRST, SECOND):
            picker.choose = always(dead.endpoint, cluster)
            assert_refused(await http1(envoy.url, body=b"{}"), 503, "service_unavailable")


async def test_engine_503_response_passes_unchanged(engines: list[Upstream], picker: Picker, tmp_path: Path) -> None:
    async def overloaded(request: web.Request, received: Received) -> web.Response:
        return web.Response(status=503, text="the engine's words")

    engines[2].answer = overloaded
    async with Envoy(settings_for([pool_of(engines, name="second")], [picker]), directory=tmp_path) as envoy:
        reply = await http1(envoy.url, body=b"{}")
    assert (reply.status, reply.body) == (503, b"the engine's words")


@modes
@pytest.mark.parametrize(
    ("head", "status"),
    [
        pytest.param(b"GARBAGE", b"400", id="request line"),
        pytest.param(b"GET models HTTP/1.1\r\nhost: x", b"400", id="path"),
        pytest.param(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: two", b"400", id="content-length"),
        pytest.param(
            b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ntransfer-encoding: chunked", b"400", id="two lengths"
        ),
        pytest.param(b"GET / HTTP/1.1\r\nhost: x\r\nx-long: " + b"x" * 70_000, b"431", id="long header"),
        pytest.param(b"CONNECT example.com:443 HTTP/1.1\r\nhost: example.com:443", b"404", id="CONNECT"),
    ],
)
async def test_malformed_request_gets_error_and_is_not_forwarded(
    mode: Mode, head: bytes, status: bytes, engines: list[Upstream], picker: Picker, tmp_path: Path
) -> None:
    async with Envoy(settings_for([pool_of(engines, name="first")], [picker], mode=mode), directory=tmp_path) as envoy:
        answer = await raw(envoy.port, head + b"\r\n\r\n0\r\n\r\n", timeout_s=10.0)
    assert answer.startswith(b"HTTP/1.1 " + status)
    assert not picker.streams
    assert not any(engine.received for engine in engines)


@modes
async def test_http_1_0_request_is_served(mode: Mode, engines: list[Upstream], picker: Picker, tmp_path: Path) -> None:
    async with Envoy(settings_for([pool_of(engines, name="second")], [picker], mode=mode), directory=tmp_path) as envoy:
        for request in (b"GET /v1/models HTTP/1.0\r\n\r\n", b"POST / HTTP/1.0\r\ncontent-length: 2\r\n\r\n{}"):
            head, _, body = (await raw(envoy.port, request, timeout_s=10.0)).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.0 200 ")
            assert json.loads(body)["object"] == "chat.completion"
    assert [received.body for received in engines[2].received] == [b"", b"{}"]


async def test_endpoints_update_from_second_router_if_the_first_stops(
    engines: list[Upstream], picker: Picker, tmp_path: Path
) -> None:
    a, b, _ = engines
    async with Picker(choose=picker.choose) as other:
        for each in (picker, other):
            each.choose = always(b.endpoint, FIRST)
            each.publish(FIRST, [(a.host, a.port, "HEALTHY"), (b.host, b.port, "DRAINING")])
        settings = settings_for([pool_of([], name="first")], [picker, other], static_endpoints=False)
        async with Envoy(settings, directory=tmp_path) as envoy:
            await envoy.wait_for_hosts(FIRST, {a.endpoint, b.endpoint})
            assert_served(await http1(envoy.url, body=b"{}"), b, b"{}")
            for each in (picker, other):
                each.choose = always("127.0.0.9:1", FIRST)
            for _ in range(4):
                assert_served(await http1(envoy.url, body=b"{}"), a, b"{}")

            gone, left = (picker, other) if picker.eds_requests else (other, picker)
            await gone.stop()
            left.publish(FIRST, [(b.host, b.port, "HEALTHY")])
            await envoy.wait_for_hosts(FIRST, {b.endpoint})
            await left.stop()
            assert_served(await http1(envoy.url, body=b"{}"), b, b"{}")


async def test_draining_member_serves_only_picked_requests(
    engines: list[Upstream], picker: Picker, tmp_path: Path
) -> None:
    a, b, _ = engines
    settings = settings_for([pool_of([], name="first", draining=[a, b])], [picker])
    async with Envoy(settings, directory=tmp_path) as envoy:
        picker.choose = always(b.endpoint, FIRST)
        assert_served(await http1(envoy.url, body=b"{}"), b, b"{}")
        picker.choose = always("127.0.0.9:1", FIRST)
        assert (await http1(envoy.url, body=b"{}")).status == 503


async def test_restarted_engine_serves_picked_request_at_once(
    engines: list[Upstream], picker: Picker, tmp_path: Path
) -> None:
    a, b, _ = engines
    picker.choose = always(f"{a.endpoint},{b.endpoint}", FIRST)
    async with Envoy(settings_for([pool_of(engines, name="first")], [picker]), directory=tmp_path) as envoy:
        await a.stop()
        for _ in range(3):
            assert_served(await http1(envoy.url, body=b"{}"), b, b"{}")
        ejected = await envoy.stats(r"outlier_detection.ejections_active$")
        assert sum(ejected.values()) == 1
        await a.start()
        assert_served(await http1(envoy.url, body=b"{}"), a, b"{}")


async def test_every_router_gets_all_access_log_entries_with_usage(
    engines: list[Upstream], picker: Picker, tmp_path: Path
) -> None:
    engine = engines[0]
    picker.choose = always(engine.endpoint, FIRST)
    usage = json.dumps({"choices": [], "usage": USAGE})
    wrapped = {"input_tokens": 10, "output_tokens": 3, "input_tokens_details": {"cached_tokens": 8}}
    done = json.dumps({"type": "response.completed", "response": {"usage": wrapped}})

    async with Picker(choose=picker.choose) as other:
        settings = settings_for([pool_of([engine], name="first")], [picker, other])
        async with Envoy(settings, directory=tmp_path) as envoy:
            # An HTTP/1 client may close the connection at the last byte of a known length; Envoy then logs a client
            # disconnect.
            whole = await http2(envoy.port, path="/", body=b"{}")
            engine.answer = sse([b'data: {"choices": [1]}\n\n', f"data: {usage}\n\n".encode(), b"data: [DONE]\n\n"])
            streamed = await http1(envoy.url, body=b"{}")
            engine.answer = sse([f"event: response.completed\ndata: {done}\n\n".encode()])
            response = await http1(envoy.url, body=b"{}")
            assert [r.status for r in (whole, streamed, response)] == [200] * 3
            for each in (picker, other):
                await each.wait_for_entries(3)
    for each in (picker, other):
        tags = [dict(entry.common_properties.custom_tags) for entry in each.entries]
        for found in tags:
            assert found[names.TAG_REQUEST_ID] == "request-1"
            assert found[names.TAG_ENDPOINT] == engine.endpoint
            assert found[names.TAG_FLAGS] == "-"
            assert 0 < int(found[names.TAG_TTFT_US]) <= int(found[names.TAG_TOTAL_US])
            assert {tag: found.get(tag) for tag in USAGE_TAGS} == USAGE_TAGS


async def test_status_listener_exposes_only_readiness_and_stats(
    engines: list[Upstream], picker: Picker, tmp_path: Path
) -> None:
    picker.choose = always(engines[0].endpoint, FIRST)
    settings = dataclasses.replace(
        settings_for([pool_of(engines, name="first")], [picker]),
        admin=Address(host="127.0.0.1", port=reserved_port()),
        status=Address(host="127.0.0.1", port=reserved_port()),
    )
    assert settings.status is not None
    status = f"http://127.0.0.1:{settings.status.port}"
    async with Envoy(settings, directory=tmp_path) as envoy, aiohttp.ClientSession() as session:
        assert_served(await http1(envoy.url, body=b"{}"), engines[0], b"{}")
        async with session.get(f"{status}/ready") as ready:
            assert ready.status == 200
        async with session.get(f"{status}/stats/prometheus") as statistics:
            page = await statistics.text()
        assert 'envoy_http_ext_proc_failure_mode_allowed{envoy_http_conn_manager_prefix="requests"} 0' in page
        for path in ("/", "/config_dump", "/certs", "/stats", "/ready/../config_dump"):
            async with session.get(status + path) as hidden:
                assert hidden.status == 404, path
        async with session.post(f"{status}/quitquitquit") as quitting:
            assert quitting.status == 404
