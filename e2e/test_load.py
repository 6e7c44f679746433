"""Tests that hundreds of concurrent requests through an Envoy with two workers succeed, and that no load remains."""

import asyncio
import json

import pytest

from harness.clients import Reply, http2, sha256
from harness.deployment import CHAT, Deployment
from harness.documents import chat, prompt_of, receipt
from harness.shared_engines import SharedEngines
from harness.upstream import DIGEST_HEADER, ENGINE_HEADER

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.always_picked]

REQUESTS = 240
CLIENTS = 24
POOL = "llm/fast"


def bodies(mode: str) -> list[bytes]:
    """Return bodies with a dozen shared prefixes; every second body requests streaming."""
    made = []
    for number in range(REQUESTS):
        prompt = prompt_of(4 + number % 5, seed=f"{mode} prefix {number % 12}") + f" question {number}"
        stream = {"stream": True, "stream_options": {"include_usage": True}} if number % 2 else {}
        made.append(json.dumps(chat("fast", prompt, max_tokens=1 + number % 7, **stream)).encode())
    return made


async def test_requests_over_two_envoy_workers_are_answered_and_ended(
    engines: SharedEngines, deployment: Deployment
) -> None:
    before = {
        outcome: await deployment.metric("dualmap_completions_total", pool=POOL, outcome=outcome)
        for outcome in ("finished", "rejected", "aborted", "expired")
    }
    measured = await deployment.metric("dualmap_measured_cached_tokens_total", pool=POOL)
    room = asyncio.Semaphore(CLIENTS)

    async def ask(number: int, body: bytes) -> Reply:
        async with room:
            if number % 3 == 0:
                headers = {"content-type": "application/json"}
                return await http2(deployment.envoy.port, path=CHAT, body=body, headers=headers)
            return await deployment.ask(body, chunk_bytes=1000 if number % 3 == 1 else 0)

    sent = bodies(deployment.mode.value)
    replies = await asyncio.gather(*(ask(number, body) for number, body in enumerate(sent)))
    assert [reply.status for reply in replies] == [200] * REQUESTS
    assert [reply.headers[DIGEST_HEADER] for reply in replies] == [sha256(body) for body in sent]
    names = {engine.name: engine.endpoint for engine in engines.fast}
    assert all(names[receipt(reply)["chosen"]] == reply.headers[ENGINE_HEADER] for reply in replies)
    assert {reply.headers[ENGINE_HEADER] for reply in replies} == set(names.values())

    await deployment.wait_for_rest()
    for outcome, more in (("finished", REQUESTS), ("rejected", 0), ("aborted", 0), ("expired", 0)):
        await deployment.wait_for_metric(
            "dualmap_completions_total", before[outcome] + more, pool=POOL, outcome=outcome
        )
    cached = measured + sum(cached_tokens(reply) for reply in replies)
    await deployment.wait_for_metric("dualmap_measured_cached_tokens_total", cached, pool=POOL)
    assert (await deployment.envoy.stats(r"^server\.concurrency$"))["server.concurrency"] == 2


def cached_tokens(reply: Reply) -> int:
    """Return the engine's number of cached tokens, from a plain response or from the second last event."""
    text = reply.body
    if reply.headers["content-type"].startswith("text/event-stream"):
        text = text.split(b"\n\n")[-3].removeprefix(b"data: ")
    cached: int = json.loads(text)["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached
