"""A pool whose tokenizer counts other tokens than its engine: the router says so, and routes by its own record.

The engine makes a token of four bytes. Prompts consist of one symbol and three zero bytes for each token, so that the
engine's ids are small enough for a tokenizer's vocabulary.
"""

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from dualmap_extproc.envoy.config.settings import Mode
from dualmap_operator.decide.observed import TokenizerReport
from dualmap_operator.observe.status_clients import RouterAddress, RouterClient
from extproc.tokenizer_files import byte_letters, tokenizer_json, write_tokenizer
from harness.deployment import Deployment
from harness.documents import document, receipt
from harness.stack import Engine
from harness.waiting import until

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.always_picked]

POOL = "qwen"
COMPLETIONS = "/v1/completions"
MISMATCHES = "dualmap_tokenizer_mismatches_total"
BLOCK = 16
SYMBOLS = "!#$%&()*+/:;<=>?@"
TIMEOUT_S = 30.0
DISTRUSTED = [{"model": f"{POOL}-model", "api": "completions", "tools": False}]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One answered request: the receipt's source and prediction beside the engine's report, in tokens."""

    source: str
    predicted: int
    cached: int
    prompt: int


class Site:
    """One engine with KV events, and a router and an Envoy whose pool reads a tokenizer from ``folder``."""

    def __init__(self, folder: Path, deployment: Deployment) -> None:
        self.folder = folder
        self._deployment = deployment

    async def ask(self, prompt: str) -> Measured:
        """Send a prompt through Envoy and compare the receipt with the usage."""
        body = {"model": f"{POOL}-model", "prompt": prompt, "max_tokens": 1}
        reply = await self._deployment.ask(body, path=COMPLETIONS)
        assert reply.status == 200, reply
        usage, said = json.loads(reply.body)["usage"], receipt(reply)
        tokens = usage["prompt_tokens"]
        return Measured(
            source=said["source"],
            predicted=round(int(said["matched"]) * tokens / int(said["prompt"]) / BLOCK) * BLOCK,
            cached=usage["prompt_tokens_details"]["cached_tokens"],
            prompt=tokens,
        )

    async def repeated(self, seed: str) -> Measured:
        """Send a new prompt, wait until the router knows its blocks from events, and return its repetition."""
        stored = await self._blocks()
        first = await self.ask(prompt_of(200, seed=seed))

        async def known() -> bool:
            return await self._blocks() >= stored + first.prompt // BLOCK

        await until(known, "the router knows the prompt's blocks", timeout_s=TIMEOUT_S)
        return await self.ask(prompt_of(200, seed=seed))

    async def state(self) -> dict[str, Any]:
        """Return what /pools says about the pool's tokenizer."""
        url = f"http://127.0.0.1:{self._deployment.router.ports['metrics']}/pools/llm/{POOL}"
        async with aiohttp.ClientSession() as http, http.get(url) as response:
            tokenizer: dict[str, Any] = (await response.json())["tokenizer"]
        return tokenizer

    async def operators_report(self) -> TokenizerReport:
        """Return what the operator reads from /pools, for the condition TokensAgree."""
        client = RouterClient()
        try:
            address = RouterAddress(host="127.0.0.1", port=self._deployment.router.ports["metrics"])
            ((report, _),) = await client.reports(f"llm/{POOL}", [address])
        finally:
            await client.close()
        assert report.answered
        return report.tokenizer

    async def mismatches(self) -> float:
        """Return how many requests had another count."""
        return await self._deployment.metric(MISMATCHES, pool=f"llm/{POOL}")

    async def compared(self, mismatches: int) -> None:
        """Wait until this many requests had another count."""
        await self._deployment.wait_for_metric(MISMATCHES, mismatches, pool=f"llm/{POOL}")

    async def rejected(self) -> None:
        """Wait until /pools says what is wrong with the folder's newest version."""

        async def reason() -> bool:
            return "tokenizer.json" in (await self.state())["reason"]

        await until(reason, "the router rejects the folder", timeout_s=TIMEOUT_S)

    async def read(self, text: str) -> None:
        """Wait until the router's log says that it read a folder, after ``text`` was its log."""
        await self._deployment.router.wait_for_line("Read tokenizer", after=len(text))

    @property
    def log(self) -> str:
        return self._deployment.router.output()

    async def _blocks(self) -> int:
        (member,) = (await self._deployment.page(POOL)).values()
        assert member["engine"]["events"]["state"] == "Live", member
        return int(member["engine"]["events"]["blocks"])


@asynccontextmanager
async def served(directory: Path, folder: Path) -> AsyncIterator[Site]:
    """Start the processes, and wait until the router follows the engine's events."""
    engine = Engine(directory=directory, name="engine", arguments=("--speed", "1000"), kv_events=True)
    async with engine:
        tokenizer = {"source": "Files", "path": str(folder)}
        pool = document(POOL, [engine.member], engine={"tokenizer": tokenizer, "kvEvents": {"enabled": True}})
        deployment = Deployment({POOL: pool}, mode=Mode.STREAMED, directory=directory)
        async with deployment:

            async def live() -> bool:
                (member,) = (await deployment.page(POOL)).values()
                return bool(member["engine"]["events"]["state"] == "Live")

            await until(live, "the router follows the engine", timeout_s=TIMEOUT_S)
            yield Site(folder, deployment)


def write_engines_tokenizer(folder: Path) -> None:
    """Write a tokenizer with the ids of the engine, for prompts of SYMBOLS with three zero bytes each."""
    write_tokenizer(folder)
    letters = byte_letters()
    zero = letters[0]
    vocab = {letters[ord(symbol)] + 3 * zero: ord(symbol) for symbol in SYMBOLS}
    pieces = [zero * 2, *(letters[ord(symbol)] + zero for symbol in SYMBOLS), *letters.values()]
    # A vocabulary has no gaps.
    numbers = (number for number in count() if chr(number) not in SYMBOLS)
    vocab |= {piece: next(numbers) for piece in pieces}
    merges = [f"{letters[ord(symbol)]} {zero}" for symbol in SYMBOLS] + [f"{zero} {zero}"]
    merges += [f"{letters[ord(symbol)]}{zero} {zero}{zero}" for symbol in SYMBOLS]
    tokenizer = tokenizer_json(special=())
    tokenizer["model"] |= {"vocab": vocab, "merges": merges}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def prompt_of(tokens: int, *, seed: str) -> str:
    """Return a prompt of this many of the engine's tokens."""
    chooser = random.Random(seed)
    return "".join(f"{chooser.choice(SYMBOLS)}\0\0\0" for _ in range(tokens))


async def test_wrong_tokenizer_is_distrusted_until_another_is_read(tmp_path: Path) -> None:
    async with served(tmp_path, write_tokenizer(tmp_path / "tokenizer")) as site:
        # The router still uses the ids, which are not the engine's.
        assert (await site.repeated("wrong")).source == "events"

        # The second difference was one too many.
        await site.compared(2)
        state = await site.state()
        assert (state["ready"], state["reason"], state["distrusted"]) == (True, "", DISTRUSTED)
        assert await site.operators_report() == TokenizerReport(differing=(f"'{POOL}-model' (completions)",))
        own = await site.ask(prompt_of(200, seed="own")), await site.ask(prompt_of(200, seed="own"))
        assert [each.source for each in own] == ["records"] * 2
        assert own[1].predicted > 0 < own[1].cached
        await site.compared(4)

        before = site.log
        await asyncio.to_thread(write_engines_tokenizer, tmp_path / "engines")
        # One change of one file, so that the router reads no version in between.
        (tmp_path / "engines" / "tokenizer.json").replace(site.folder / "tokenizer.json")
        await site.read(before)
        assert (await site.state())["distrusted"] == []
        assert await site.operators_report() == TokenizerReport()
        trusted = await site.repeated("trusted")
        assert trusted.source == "events"
        assert trusted.predicted == trusted.cached == trusted.prompt // BLOCK * BLOCK
        assert ((await site.state())["distrusted"], await site.mismatches()) == ([], 4)


async def test_corrupt_folder_keeps_the_last_valid_tokenizer(tmp_path: Path) -> None:
    folder = tmp_path / "tokenizer"
    write_engines_tokenizer(folder)
    async with served(tmp_path, folder) as site:
        assert (await site.repeated("valid")).source == "events"

        (folder / "tokenizer.json").write_text('{"model": ')
        await site.rejected()
        kept = await site.repeated("kept")
        assert kept.source == "events"
        assert kept.predicted == kept.cached > 0
        state = await site.state()
        assert (state["ready"], state["distrusted"], await site.mismatches()) == (True, [], 0)
        assert "tokenizer.json" in (await site.operators_report()).problem
        assert "Rejected tokenizer" in site.log
        assert "keeping the last valid version" in site.log

        before = site.log
        await asyncio.to_thread(write_engines_tokenizer, folder)
        await site.read(before)
        assert (await site.state())["reason"] == ""
