"""The command ``python -m bench hostile``: other clients and health checks while clients send hostile bodies.

Each round measures one router without attackers, and then under each attack. Others send requests at fixed times.
Health checks are those of Envoy (gRPC) and requests of a page of the metrics port (HTTP). The steps of the router's
event loop are timed inside the router (``timed_router``).
"""

import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import median

import aiohttp
import click
import grpc.aio
from bench.gateway.load import Job, Result, quantile
from bench.gateway.stacks import BenchError, Lab, Stack
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub

from dualmap_cli.demo.children import Children
from dualmap_cli.demo.errors import ChildError

NONE = "none"
# The digits of each attack's numbers. The router counts 8 million numbers and refuses them; it parses 941,000 numbers.
ATTACKS: Mapping[str, int] = {NONE: 0, "8,000,000 numbers": 1, "941,000 numbers": 16}
_RATE = 20.0
_CHUNKS = 5
_CHECK_EVERY_S = 0.05
_CHECK_TIMEOUT_S = 10.0
_SETTLE_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One attack in one round: others' results, health checks, the longest step, and the attackers' statuses."""

    attack: str
    others: Result
    grpc_s: Sequence[float]
    http_s: Sequence[float]
    step_cpu_ms: float
    step_wall_ms: float
    answers: Mapping[str, int]


class Experiment:
    """The measurements of one router behind one Envoy."""

    def __init__(self, children: Children, folder: Path, *, connections: int, seconds: float) -> None:
        self._children = children
        self._folder = folder
        self._steps = folder / "steps.json"
        self._connections = connections
        self._seconds = seconds
        self._firsts = count(0, 1_000_000)
        self._lab: Lab
        self._stack: Stack

    async def start(self) -> None:
        """Start the processes."""
        self._lab = Lab(self._children, self._folder)
        await self._lab.start()
        self._stack = await self._lab.routers("1 router", 1, program=("bench.hostile.timed_router", str(self._steps)))

    async def measure(self, attack: str) -> Sample:
        """Measure one attack."""
        if attack == NONE:
            return await self._measure(attack, dict)
        arguments = (self._stack.port, self._connections, ATTACKS[attack])
        command = (sys.executable, "-m", "bench.hostile.attackers", *map(str, arguments))
        attackers = await self._children.start("attackers", command)
        try:
            return await self._measure(attack, lambda: Counter(attackers.log.read_text().split()))
        finally:
            attackers.signal_group(signal.SIGKILL)
            await attackers.process.wait()

    async def _measure(self, attack: str, answers: Callable[[], Mapping[str, int]]) -> Sample:
        job = Job(
            port=self._stack.port,
            connections=1,
            rate=_RATE,
            seconds=self._seconds,
            ramp_s=0.0,
            prompt_bytes=1024,
            chunks=_CHUNKS,
            first=next(self._firsts),
            pids=self._stack.pids,
        )
        await asyncio.sleep(_SETTLE_S)
        await self._longest_step_ms()
        addresses = self._stack.addresses[0]
        timeout = aiohttp.ClientTimeout(total=_CHECK_TIMEOUT_S)
        async with grpc.aio.insecure_channel(addresses["grpc"]) as channel, aiohttp.ClientSession() as session:

            async def check_grpc() -> None:
                await HealthStub(channel).Check(HealthCheckRequest(), timeout=_CHECK_TIMEOUT_S)

            async def check_http() -> None:
                async with session.get(f"http://{addresses['metrics']}/pools", timeout=timeout) as response:
                    await response.read()

            others, grpc_s, http_s = await asyncio.gather(
                self._lab.load.run(job), self._times_s(check_grpc), self._times_s(check_http)
            )
        step = await self._longest_step_ms()
        return Sample(
            attack=attack,
            others=others,
            grpc_s=grpc_s,
            http_s=http_s,
            step_cpu_ms=step["cpu_ms"],
            step_wall_ms=step["wall_ms"],
            answers=answers(),
        )

    async def _times_s(self, check: Callable[[], Awaitable[None]]) -> list[float]:
        """Repeat a check at fixed times; return its durations from these times."""
        await check()
        durations_s, due_s = [], time.perf_counter()
        ends_s = due_s + self._seconds
        while due_s < ends_s:
            await asyncio.sleep(due_s - time.perf_counter())
            await check()
            durations_s.append(time.perf_counter() - due_s)
            due_s += _CHECK_EVERY_S
        return durations_s

    async def _longest_step_ms(self) -> dict[str, float]:
        """Return the longest step of the router's event loop since the last call."""
        self._steps.unlink(missing_ok=True)
        os.kill(self._stack.pickers[0], signal.SIGUSR1)
        async with asyncio.timeout(_CHECK_TIMEOUT_S):
            while not self._steps.exists():  # noqa: ASYNC110 - another process writes the file
                await asyncio.sleep(0.01)
        longest: dict[str, float] = json.loads(self._steps.read_text())
        return longest


FIGURES: Mapping[str, Callable[[Sample], float]] = {
    "others' first byte p50, ms": lambda each: each.others.ttfb_p50_ms,
    "others' first byte p90, ms": lambda each: each.others.ttfb_p90_ms,
    "gRPC health p50, ms": lambda each: quantile(each.grpc_s, 0.5) * 1e3,
    "gRPC health p99, ms": lambda each: quantile(each.grpc_s, 0.99) * 1e3,
    "HTTP p50, ms": lambda each: quantile(each.http_s, 0.5) * 1e3,
    "HTTP p99, ms": lambda each: quantile(each.http_s, 0.99) * 1e3,
    "longest step of the loop, ms of CPU": lambda each: each.step_cpu_ms,
    "the same, ms of wall time": lambda each: each.step_wall_ms,
}


def table(samples: Sequence[Sample]) -> str:
    """Return a Markdown table: the median over the rounds, and its ratio to the median without attackers."""
    head = ["attack", *FIGURES, "others not answered 200", "answers to attackers"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for attack in ATTACKS:
        mine = [each for each in samples if each.attack == attack]
        cells = [attack]
        for figure in FIGURES.values():
            value, base = (median(figure(each) for each in samples if each.attack == name) for name in (attack, NONE))
            cells.append(f"{value:.1f}" if attack == NONE else f"{value:.1f} ({value / base:.1f} x)")
        cells.append(f"{sum(each.others.errors for each in mine)} of {sum(each.others.sent for each in mine)}")
        answers = sum((Counter(each.answers) for each in mine), Counter[str]())
        cells.append(", ".join(f"{number} x {status}" for status, number in sorted(answers.items())))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


@click.command(context_settings={"show_default": True})
@click.option("--rounds", default=3, type=click.IntRange(1, 100), help="Number of rounds.")
@click.option("--seconds", default=15.0, type=click.FloatRange(1, 600), help="Length of one measurement in seconds.")
@click.option("--connections", default=10, type=click.IntRange(1, 200), help="Number of attacking connections.")
def hostile(*, rounds: int, seconds: float, connections: int) -> None:
    """Measure a router while clients send 16 MB bodies of numbers in a loop.

    The table compares with the same router without attackers, in the same run.
    """
    began, before = time.monotonic(), os.getloadavg()
    samples = []

    async def run() -> None:
        with tempfile.TemporaryDirectory(prefix="dualmap-bench-") as folder:
            async with Children(Path(folder) / "logs") as children:
                experiment = Experiment(children, Path(folder), connections=connections, seconds=seconds)
                await experiment.start()
                await experiment.measure(NONE)  # warms up
                for number in range(1, rounds + 1):
                    for attack in ATTACKS:
                        click.echo(f"round {number} of {rounds}: attack: {attack}", err=True)
                        samples.append(await experiment.measure(attack))

    try:
        asyncio.run(run())
    except (BenchError, ChildError, grpc.RpcError, aiohttp.ClientError, TimeoutError) as error:
        click.echo(f"bench hostile: {error}", err=True)
        sys.exit(1)
    loads = "; ".join(", ".join(f"{each:.1f}" for each in load) for load in (before, os.getloadavg()))
    click.echo(
        f"machine: {os.cpu_count()} cores; load average before and after: {loads}; {time.monotonic() - began:.0f} s; "
        f"median of {rounds} rounds of {seconds:g} s\n\n{table(samples)}"
    )
