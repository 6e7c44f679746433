"""Tests of a simulated engine that publishes KV events: what a router computes from them equals the engine's usage."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import msgspec
import pytest
import zmq
import zmq.asyncio
from aiohttp import ClientSession

from dualmap.engines.events import Batch, Cleared, Event, Stored, read_batch
from dualmap.engines.held_blocks import HeldBlocks
from dualmap.engines.profile import EventSource, read_event_sources, read_metrics
from dualmap.engines.residency import Residency
from dualmap.engines.source import Message, read_frames
from dualmap.engines.token_chain import chain_tokens, pack_tokens, token_root
from dualmap_sim.http_server import EngineHttpServer
from dualmap_sim.presets import PRESETS
from dualmap_sim.server_settings import KvEventSettings, ServerSettings

CONFIG = replace(PRESETS["7b"], block_tokens=16, cache_tokens=64 * 16)
TEXT = "the quick brown fox jumps over the lazy dog and then over the next one too, for it can "
CHAT = {"model": "m", "messages": [{"role": "user", "content": TEXT * 3}], "max_tokens": 40}


class Scene:
    """An engine, and a router that has subscribed to its events."""

    def __init__(self, client: ClientSession, socket: zmq.asyncio.Socket, source: EventSource) -> None:
        self.client = client
        self.socket = socket
        self.source = source
        self.events: list[Event] = []
        self.numbers: list[int] = []
        self.residency = Residency(HeldBlocks(), model="m", capacity_blocks=63)

    async def follow(self) -> None:
        """Apply the events that arrive until the engine is silent."""
        while await self.socket.poll(200):
            message = read_frames(await self.socket.recv_multipart())
            assert isinstance(message, Message)
            batch = read_batch(msgspec.msgpack.decode(message.payload))
            assert isinstance(batch, Batch)
            self.numbers.append(message.number)
            self.events += batch.events
            self.residency.apply(0, batch)

    async def post(self, path: str, body: object = None) -> object:
        async with self.client.post(path, json=body) as response:
            assert response.status == 200
            raw = await response.read()
            return msgspec.json.decode(raw) if raw else None

    async def ask(self, path: str, body: dict[str, object]) -> dict[str, object]:
        """Send a request and return its usage."""
        answer = await self.post(path, body)
        assert isinstance(answer, dict)
        usage: dict[str, object] = answer["usage"]
        return usage

    async def render(self, path: str, body: dict[str, object]) -> list[int]:
        answer = await self.post(f"{path}/render", body)
        (request,) = answer if isinstance(answer, list) else [answer]
        ids: list[int] = request["token_ids"]
        return ids

    def predict(self, ids: list[int], salt: str = "", adapter: str = "") -> int:
        root = token_root(model="m", cache_salt=salt, adapter=adapter)
        return self.residency.matched_tokens(chain_tokens(pack_tokens(ids), root=root, block_tokens=16))


def cached(usage: dict[str, object]) -> int:
    details = usage["prompt_tokens_details"]
    assert isinstance(details, dict)
    tokens: int = details["cached_tokens"]
    return tokens


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    settings = ServerSettings(
        host="127.0.0.1",
        port=0,
        model="m",
        config=CONFIG,
        speed=1000.0,
        api_key=None,
        adapters=("tuned",),
        kv_events=KvEventSettings(port=0, replay_port=0),
    )
    server = EngineHttpServer(settings)
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.SUB)
    try:
        address = await server.start()
        async with ClientSession(f"http://{address}") as client:
            async with client.get("/kv_event_sources") as response:
                (source,) = read_event_sources(await response.json()).event_sources
            socket.subscribe(b"")
            socket.connect(f"tcp://127.0.0.1:{source.port}")
            # A subscription takes a moment.
            await asyncio.sleep(0.3)
            yield Scene(client, socket, source)
    finally:
        context.destroy(linger=0)
        await server.close()


async def test_rendered_ids_equal_usage_tokenize_and_events(scene: Scene) -> None:
    path = "/v1/chat/completions"
    ids = await scene.render(path, CHAT)
    counted = await scene.post("/tokenize", {"messages": CHAT["messages"]})
    usage = await scene.ask(path, CHAT)
    await scene.follow()

    assert isinstance(counted, dict)
    assert counted["tokens"] == ids
    assert usage["prompt_tokens"] == len(ids)
    stored = [event for event in scene.events if isinstance(event, Stored)]
    reported = b"".join(event.tokens for event in stored)
    # The answer's last token has no KV.
    assert len(reported) // 4 == (len(ids) + 40 - 1) // 16 * 16
    assert reported[: len(ids) * 4] == pack_tokens(ids)


async def test_predictions_equal_the_cached_tokens(scene: Scene) -> None:
    path = "/v1/completions"
    predicted, measured = [], []
    for number in range(24):
        # A prefix of several prompts, prompts that end with a full block, and prompts that were displaced.
        length = 16 * (3 + number % 5) + (number % 3 and 5)
        ids = [n if n < 32 else 1000 * (number % 7) + n for n in range(length)]
        salt, adapter = ("tenant", "") if number % 5 == 4 else ("", "tuned" if number % 6 == 5 else "")
        body: dict[str, object] = {"prompt": ids, "max_tokens": 20, "model": adapter or "m", "cache_salt": salt}
        rendered = await scene.render(path, body)
        assert rendered == ids
        predicted.append(scene.predict(rendered, salt, adapter))
        measured.append(cached(await scene.ask(path, body)))
        await scene.follow()

    assert predicted == measured
    assert any(measured)
    counts = scene.residency.counts
    assert counts.removed > 0
    assert counts.copied > 0
    assert counts.drifts == 0
    assert scene.numbers == list(range(len(scene.numbers)))


async def test_answer_is_cached_for_the_next_turn(scene: Scene) -> None:
    prompt = "1234" * 20
    answer = await scene.post("/v1/completions", {"prompt": prompt, "max_tokens": 40})
    await scene.follow()
    assert isinstance(answer, dict)
    following = prompt + answer["choices"][0]["text"] + "and on"
    ids = await scene.render("/v1/completions", {"prompt": following})

    # Of 20 + 40 tokens, 59 have KV.
    assert scene.predict(ids) == 48
    assert cached(await scene.ask("/v1/completions", {"prompt": following})) == 48


@pytest.mark.parametrize("path", ["/reset_prefix_cache", "/sleep"])
async def test_reset_is_published_with_the_next_step(scene: Scene, path: str) -> None:
    await scene.ask("/v1/chat/completions", CHAT)
    await scene.post(path)
    await scene.follow()
    assert Cleared() not in scene.events

    await scene.post("/wake_up")
    usage = await scene.ask("/v1/chat/completions", CHAT)
    await scene.follow()
    assert cached(usage) == 0
    assert Cleared() in scene.events


async def test_profile_has_the_memory_of_the_block_pool(scene: Scene) -> None:
    async with scene.client.get("/metrics") as response:
        profile = read_metrics("vLLM", await response.read())

    assert (profile.kv_tokens, profile.cache_tokens) == (63 * 16, 63 * 16)


async def test_request_larger_than_the_block_pool_is_rejected(scene: Scene) -> None:
    body = {"prompt": [1] * 32, "max_tokens": 63 * 16}
    async with scene.client.post("/v1/completions", json=body) as response:
        assert response.status == 400
        assert "leaves room for 976 tokens" in (await response.json())["error"]["message"]
