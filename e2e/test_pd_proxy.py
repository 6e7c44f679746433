"""Tests of ``dualmap pd-proxy`` behind a real Envoy: prefillers that work, are full, hang and die."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from harness.pd_site import PdSite
from harness.stack import Engine
from harness.upstream import Upstream
from harness.waiting import until

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.always_picked]


@pytest_asyncio.fixture(scope="module", loop_scope="session", name="site_of_module")
async def _site_of_module(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[PdSite]:
    async with PdSite(tmp_path_factory.mktemp("pd")) as site:
        yield site


@pytest_asyncio.fixture(loop_scope="session", name="site")
async def _site(site_of_module: PdSite) -> AsyncIterator[PdSite]:
    yield site_of_module
    await site_of_module.heal()


def prompt(name: str, words: int = 400) -> str:
    """Return a prompt that no other test uses."""
    return f"{name} " + "the fox ran far " * words


@asynccontextmanager
async def paused(*engines: Engine) -> AsyncIterator[None]:
    """Pause engines, which then accept connections and never answer."""
    for engine in engines:
        engine.pause()
    try:
        yield
    finally:
        for engine in engines:
            engine.resume()


@asynccontextmanager
async def asleep(engine: Engine) -> AsyncIterator[None]:
    """Let an engine answer 503."""
    async with aiohttp.ClientSession() as session:
        async with session.post(f"http://{engine.endpoint}/sleep"):
            pass
        yield
        async with session.post(f"http://{engine.endpoint}/wake_up"):
            pass


async def test_prefillers_kv_is_decoded_without_a_prefill(site: PdSite) -> None:
    text = prompt("remote")
    computed = await site.engine_metric(site.decoder, "vllm:prompt_tokens_total")
    where, remote, usage = await site.ask(text, site.naming(site.first, site.second))
    assert where == "remote"
    assert usage["cached_tokens"] == usage["prompt"] - 1
    assert await site.engine_metric(site.first, "vllm:prompt_tokens_total") >= usage["prompt"]
    where, alone, _ = await site.ask(text, {})
    assert (where, alone) == ("none", remote)
    assert await site.engine_metric(site.decoder, "vllm:prompt_tokens_total") > computed


async def test_request_without_prefillers_reaches_the_engine_in_every_byte(site: PdSite) -> None:
    body = b' {"model" : "qwen-model", "prompt": "\\u00e9 1.50", "max_tokens":3 , "temperature":0.10}\n'
    headers = {"content-type": "application/json"}
    url = f"{site.envoy.url}/v1/completions"
    async with aiohttp.ClientSession() as session, session.post(url, data=body, headers=headers) as response:
        assert response.headers["x-request-sha256"] == hashlib.sha256(body).hexdigest()
        assert response.headers["x-dualmap-prefill"] == "none"


async def test_stream_with_remote_kv_is_complete(site: PdSite) -> None:
    text = prompt("stream")
    where, remote = await site.stream(text, site.naming(site.first))
    assert where == "remote"
    assert (await site.stream(text, {}))[1] == remote
    assert len(remote) == 60 * 4


async def test_full_prefiller_is_replaced(site: PdSite) -> None:
    async with asleep(site.first):
        where, _, usage = await site.ask(prompt("full"), site.naming(site.first, site.second))
    assert where == "next"
    assert usage["cached_tokens"] == usage["prompt"] - 1
    assert await site.proxy.metric("dualmap_pd_prefill_failures_total", reason="full") >= 1


async def test_prefiller_killed_within_a_prefill_is_replaced(site: PdSite) -> None:
    async with paused(site.first):  # The request arrives, and its prefill does not end.
        asked = asyncio.create_task(site.stream(prompt("killed"), site.naming(site.first, site.second)))
        await until(lambda: connected(site), "the proxy asks the first prefiller")
        await site.first.kill()
    assert (await asked)[0] == "next"
    where, _, _ = await site.ask(prompt("killed before"), site.naming(site.first, site.second))
    assert where == "next"


async def connected(site: PdSite) -> bool:
    """Return whether the proxy answers a request."""
    return await site.proxy.metric("dualmap_pd_in_flight_requests") == 1


async def test_hung_prefiller_is_replaced_and_then_not_asked(site: PdSite) -> None:
    before = await site.proxy.metric("dualmap_pd_prefill_failures_total", reason="timeout")
    async with paused(site.second):
        assert (await site.ask(prompt("hung"), site.naming(site.second, site.first)))[0] == "next"
        assert (await site.ask(prompt("hung again"), site.naming(site.second, site.first)))[0] == "next"
    assert await site.proxy.metric("dualmap_pd_prefill_failures_total", reason="timeout") == before + 1
    assert await site.proxy.metric("dualmap_pd_prefill_failures_total", reason="paused") >= 1

    async def asked_again() -> bool:
        return (await site.ask(prompt("after the pause"), site.naming(site.second)))[0] == "remote"

    await until(asked_again, "the prefiller is asked again")


async def test_all_prefillers_gone_leave_the_prompt_to_the_decode_engine(site: PdSite) -> None:
    await asyncio.gather(site.first.kill(), site.second.kill())
    where, text = await site.stream(prompt("gone"), site.naming(site.first, site.second))
    assert where == "local"
    assert len(text) == 60 * 4
    assert "Prefiller fails" in site.proxy.output()


async def test_kv_lost_within_the_transfer_is_computed(site: PdSite) -> None:
    slow = Engine(
        directory=site.proxy.log.parent,
        name="slow",
        port=site.first.port,
        arguments=("--kv-transfer", "--speed", "50", "--kv-transfer-tokens-per-second", "1"),
    )
    await site.first.kill()
    async with slow:
        asked = asyncio.create_task(site.stream(prompt("lost"), site.naming(slow)))

        async def transferring() -> bool:
            # The prefiller has answered, and keeps the KV for the decode engine.
            return await site.engine_metric(slow, "vllm:request_success_total", finished_reason="length") == 1

        await until(transferring, "the prefill has ended")
        await slow.kill()
        where, text = await asked
    assert where == "local"
    assert len(text) == 60 * 4
    assert await site.proxy.metric("dualmap_pd_prefill_failures_total", reason="not_loaded") == 1


async def test_forged_prefiller_gets_no_request(site: PdSite) -> None:
    async with Upstream(name="outsider") as outsider:
        for forged in (f"127.0.0.1:{outsider.port}", f"localhost:{outsider.port}", "169.254.169.254:80"):
            headers = {"x-prefiller-host-port": forged, "x-dualmap-prefillers": forged}
            assert (await site.ask(prompt("forged"), headers))[0] == "none"
        parameters = {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": outsider.port}
        assert (await site.ask(prompt("forged"), {}, kv_transfer_params=parameters))[0] == "none"
        assert not outsider.received


async def test_client_that_goes_away_ends_the_prefill(site: PdSite) -> None:
    async def aborted(engine: Engine) -> float:
        return await site.engine_metric(engine, "vllm:request_success_total", finished_reason="abort")

    slow = Engine(
        directory=site.proxy.log.parent, name="slow-prefill", port=site.first.port,
        arguments=("--kv-transfer", "--speed", "0.001"),
    )  # fmt: skip
    await site.first.kill()
    async with slow:
        asked = asyncio.create_task(site.ask(prompt("leaves"), site.naming(slow)))

        async def running() -> bool:
            return await site.engine_metric(slow, "vllm:num_requests_running") == 1

        await until(running, "the prefill runs")
        asked.cancel()
        with suppress(asyncio.CancelledError):
            await asked

        async def ended() -> bool:
            return await aborted(slow) == 1

        await until(ended, "the prefill has ended")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_stream_of_a_killed_engine_is_continued_by_another(site: PdSite, path: str) -> None:
    if path == "/v1/completions":
        asked: dict[str, Any] = {"prompt": prompt("continue")}
    else:
        asked = {"messages": [{"role": "user", "content": prompt("continue")}]}
    body = {
        "model": "qwen-model",
        "max_tokens": 400,
        "stream": True,
        "stream_options": {"include_usage": True},
        **asked,
    }
    headers = {"x-dualmap-continue": f"127.0.0.1:1,{site.first.endpoint}"}
    # The engine needs seconds for the answer.
    slow = Engine(
        directory=site.proxy.log.parent, name="slow-decoder", port=site.decoder.port, arguments=("--speed", "2")
    )
    await site.decoder.kill()
    await slow.start()
    url = f"{site.envoy.url}{path}"
    async with aiohttp.ClientSession() as session, session.post(url, json=body, headers=headers) as response:
        received = b""
        while received.count(b"\n\n") < 20:
            received += await response.content.readany()
        await slow.kill()
        received += await response.read()
    await site.decoder.start()
    events = received.split(b"\n\n")
    assert events[-2:] == [b"data: [DONE]", b""]
    chunks = [json.loads(event.removeprefix(b"data: ")) for event in events[:-2]]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    text = "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)
    assert len(text) == 400 * 4
    assert len({chunk["id"] for chunk in chunks}) == 1
    (usage,) = [chunk["usage"] for chunk in chunks if "usage" in chunk]
    assert usage["completion_tokens"] == 400
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]
    assert await site.proxy.metric("dualmap_pd_continued_total", result="continued") >= 1


async def test_drain_completes_open_streams(site: PdSite) -> None:
    """This test is the last one, because it stops the proxy."""
    body = {"model": "qwen-model", "prompt": prompt("drain"), "max_tokens": 2000, "stream": True}
    url = f"{site.envoy.url}/v1/completions"
    headers = site.naming(site.first, site.second)
    async with aiohttp.ClientSession() as session, session.post(url, json=body, headers=headers) as response:
        await response.content.readany()
        site.proxy.terminate()
        events = (await response.read()).split(b"\n\n")
    assert events[-2:] == [b"data: [DONE]", b""]
    assert json.loads(events[-3].removeprefix(b"data: "))["choices"][0]["finish_reason"] == "length"
    assert await site.proxy.wait() == 0
