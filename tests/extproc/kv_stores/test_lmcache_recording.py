"""The client of LMCache reads the recorded answers of LMCache's coordinator and controller (e2e/record_lmcache.py)."""

import json
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from dualmap.kv_store.view import Chunk
from dualmap_extproc.kv_stores.contract import Question
from dualmap_extproc.kv_stores.http_client import NotFound
from dualmap_extproc.kv_stores.lmcache import LmCacheClient
from extproc.kv_stores.stores import LmCacheStub, serving

RECORDING = json.loads((Path(__file__).parents[1] / "recorded/lmcache.json").read_text())
CHUNK_TOKENS = {"coordinator": 16, "controller": 256}
KEYS = ("a", "b", "c")
HELD, MISSING = Chunk(is_held=True), Chunk(is_held=False)


def recorded(server: str, name: str) -> dict[str, Any]:
    (exchange,) = (each for each in RECORDING["exchanges"] if (each["server"], each["name"]) == (server, name))
    return dict(exchange)


@asynccontextmanager
async def replayed(server: str, *names: str) -> AsyncIterator[tuple[str, list[Any]]]:
    """Serve recorded answers by path; yield the URL and the bodies that arrive."""
    bodies: list[Any] = []
    exchanges = {each["path"]: each for each in (recorded(server, name) for name in names)}

    async def answer(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        exchange = exchanges[request.path]
        return web.json_response(exchange["answer"], status=exchange["status"])

    async with serving(*(web.post(path, answer) for path in exchanges)) as url:
        yield url, bodies


def client_of(server: str, url: str, *, world_size: int = 1) -> LmCacheClient:
    return LmCacheClient(url, model="m", chunk_tokens=CHUNK_TOKENS[server], world_size=world_size)


def asked(server: str, salt: str = "") -> Question:
    ids = array("I", range(len(KEYS) * CHUNK_TOKENS[server] + 1))
    return Question(keys=KEYS, chunks=KEYS, ids=ids, salt=salt)


@pytest.mark.parametrize(
    ("name", "world_size", "salt", "expected"),
    [
        ("nothing is stored", 1, "", [MISSING, MISSING, MISSING]),
        ("nothing is stored, two ranks", 2, "", [MISSING, MISSING, MISSING]),
        ("two chunks are stored", 1, "", [HELD, HELD, MISSING]),
        ("two ranks store one chunk, one rank another", 2, "", [HELD, MISSING, MISSING]),
        ("another salt", 1, "tenant-2", [MISSING, MISSING, MISSING]),
    ],
)
async def test_recorded_coordinator_answers_the_clients_question(
    name: str, world_size: int, salt: str, expected: list[Chunk]
) -> None:
    async with replayed("coordinator", name) as (url, bodies):
        client = client_of("coordinator", url, world_size=world_size)
        found = await client.ask(asked("coordinator", salt))
        await client.close()

    assert found == dict(zip(KEYS, expected, strict=True))
    assert bodies == [recorded("coordinator", name)["body"]]


@pytest.mark.parametrize(("name", "held"), [("nothing is stored", 0), ("two instances store the chunks", 3)])
async def test_recorded_controller_is_asked_after_its_404(name: str, held: int) -> None:
    async with replayed("controller", "the coordinator's path", name) as (url, bodies):
        client = client_of("controller", url)
        with pytest.raises(NotFound):
            await client.ask(asked("controller"))
        found = await client.ask(asked("controller"))
        await client.close()

    assert found == dict.fromkeys(KEYS[:held], HELD)
    assert bodies[1] == recorded("controller", name)["body"]


async def test_recorded_coordinator_answers_404_on_the_controllers_path() -> None:
    async with replayed("coordinator", "the controller's path", "two chunks are stored") as (url, _):
        client = client_of("coordinator", url)
        client._is_controller = True
        with pytest.raises(NotFound):
            await client.ask(asked("coordinator"))
        found = await client.ask(asked("coordinator"))
        await client.close()

    assert found == dict(zip(KEYS, [HELD, HELD, MISSING], strict=True))


@pytest.mark.parametrize("name", ["nothing is stored", "two chunks are stored"])
async def test_stub_has_the_shape_of_the_recorded_answers(name: str) -> None:
    exchange = recorded("coordinator", name)
    stub = LmCacheStub(chunk_tokens=16)
    stub.held = [sum(bool(each["placements"]) for each in exchange["answer"]["results"])]
    async with (
        stub.running(),
        aiohttp.ClientSession() as http,
        http.post(stub.url + exchange["path"], json=exchange["body"]) as response,
    ):
        answer = await response.json()

    assert shape(answer) == shape(exchange["answer"])


def shape(value: Any) -> Any:
    """Return a value with its scalars replaced by their types, and each list by its different elements' shapes."""
    if isinstance(value, dict):
        return {name: shape(each) for name, each in value.items()}
    if isinstance(value, list):
        shapes = [shape(each) for each in value]
        return [each for at, each in enumerate(shapes) if each not in shapes[:at]]
    return type(value).__name__
