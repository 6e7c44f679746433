"""python -m bench shares: members' shares of light traffic, behind a real Envoy, router and simulated engines.

Answers are not streamed. One of four engines becomes four times as slow, and recovers later. An engine changes its
speed by a restart on the same port, while no request is sent.
"""

import asyncio
import os
import random
import re
import signal
import tempfile
import time
from collections import Counter
from itertools import count
from pathlib import Path
from typing import Final

import aiohttp
import click
from bench.gateway.prompts import MODEL
from bench.gateway.stacks import HOST, START_S, BenchError, Lab, Stack, module

from dualmap_cli.demo.children import Child, Children

_ENGINES: Final = 4
_SPEED: Final = 7000
_SLOW: Final = 0.25
_PROMPT_TOKENS: Final = 1000
_CHOSEN: Final = re.compile(r'chosen="?engine-(\d+)')
_PHASES: Final = (
    ("equal", 1.0),
    ("engine 0 is four times as slow, the first minute", _SLOW),
    ("engine 0 is four times as slow, the second minute", _SLOW),
    ("engine 0 has recovered, the first minute", 1.0),
    ("engine 0 has recovered, the second minute", 1.0),
)
"""What the table calls each phase, and the speed of the first engine."""


class _Site:
    """Engines, a router and an Envoy, and the clients."""

    def __init__(self, children: Children, folder: Path, *, output_tokens: int) -> None:
        self._children = children
        self._folder = folder
        self._output_tokens = output_tokens
        self._random = random.Random(1)
        self._prompts = count()
        self._starts = count()
        self._engines: list[Child] = []
        self._ports: list[str] = []
        self._stack: Stack

    async def start(self) -> None:
        """Start the processes."""
        for _ in range(_ENGINES):
            engine = await self._engine("0", speed=1.0)
            self._engines.append(engine)
            self._ports.append((await engine.ready(within_s=START_S))["http"].rpartition(":")[2])
        engines = tuple(f"{HOST}:{port}" for port in self._ports)
        lab = Lab(self._children, self._folder, engines=engines, prefill_tokens_per_second=_SPEED)
        self._stack = await lab.routers("router", 1, members=_ENGINES)

    async def set_speed(self, speed: float) -> None:
        """Restart the first engine with another speed."""
        self._engines[0].signal_group(signal.SIGKILL)
        await self._engines[0].process.wait()
        self._engines[0] = await self._engine(self._ports[0], speed=speed)
        await self._engines[0].ready(within_s=START_S)

    async def _engine(self, port: str, *, speed: float) -> Child:
        arguments = ("engine-sim", "--host", HOST, "--port", port, "--model", MODEL, "--speed", str(speed))
        return await self._children.start(f"engine-{next(self._starts)}", module("dualmap_cli", *arguments))

    async def shares(self, rate: float, seconds: float) -> list[float]:
        """Send prompts at random times for some seconds; return each engine's share as a multiple of the mean."""
        chosen = Counter[int]()
        ends_s = time.monotonic() + seconds
        async with (
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
            asyncio.TaskGroup() as group,
        ):
            while time.monotonic() < ends_s:
                group.create_task(self._ask(session, chosen))
                await asyncio.sleep(self._random.expovariate(rate))
        return [chosen[number] * _ENGINES / chosen.total() for number in range(_ENGINES)]

    async def _ask(self, session: aiohttp.ClientSession, chosen: Counter[int]) -> None:
        prompt = f"{next(self._prompts)} ".ljust(4 * _PROMPT_TOKENS, "x")
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": self._random.randint(1, self._output_tokens),
        }
        url = f"http://{HOST}:{self._stack.port}/v1/chat/completions"
        async with session.post(url, json=body) as response:
            await response.read()
            found = _CHOSEN.search(response.headers.get("x-dualmap-decision", ""))
            if response.status != 200 or found is None:
                raise BenchError(f"the answer to a prompt is {response.status} without a decision")
            chosen[int(found[1])] += 1


async def _measure(rate: float, seconds: float, output_tokens: int) -> list[list[float]]:
    rows: list[list[float]] = []
    with tempfile.TemporaryDirectory(prefix="dualmap-bench-") as folder:
        async with Children(Path(folder) / "logs") as children:
            site = _Site(children, Path(folder), output_tokens=output_tokens)
            await site.start()
            before = 1.0
            for phase, speed in _PHASES:
                click.echo(f"measuring: {phase}", err=True)
                if speed != before:
                    await site.set_speed(speed)
                before = speed
                rows.append(await site.shares(rate, seconds))
    return rows


@click.command(context_settings={"show_default": True})
@click.option("--rate", default=10.0, type=click.FloatRange(0.1, 50), help="Requests per second.")
@click.option("--seconds", default=60.0, type=click.FloatRange(1, 600), help="Length of each phase in seconds.")
@click.option("--output-tokens", default=100, type=click.IntRange(1, 10_000), help="Longest answer in tokens.")
def shares(*, rate: float, seconds: float, output_tokens: int) -> None:
    """Measure the shares of four engines while one becomes slow and recovers; answers are not streamed."""
    before = os.getloadavg()
    rows = asyncio.run(_measure(rate, seconds, output_tokens))
    loads = "; ".join(", ".join(f"{each:.1f}" for each in load) for load in (before, os.getloadavg()))
    click.echo(f"{rate:g} requests/s, answers of 1 to {output_tokens} tokens; load average before and after: {loads}\n")
    click.echo("| phase | " + " | ".join(f"engine {number}" for number in range(_ENGINES)) + " |")
    click.echo("|---" * (_ENGINES + 1) + "|")
    for (phase, _), row in zip(_PHASES, rows, strict=True):
        click.echo(f"| {phase} | " + " | ".join(f"{each:.2f}" for each in row) + " |")
