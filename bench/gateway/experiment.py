"""Measures the stacks in turn, each once in every round, so that a disturbance of the machine affects all stacks.

Compare only figures of one run, and preferably as ratios within one round, as ``report`` does.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from bench.gateway.load import Job, Result, cpu_s
from bench.gateway.stacks import BenchError, Lab, Stack

from dualmap_cli.demo.children import Children
from dualmap_extproc.settings import Transport

ALONE, TRIVIAL, PEER, REDIS = "Envoy alone", "trivial picker", "llm-d-router", "1 router with Redis"
SIZES_KB = (1, 64, 220)
FEW_CHUNKS, MANY_CHUNKS = 5, 50
ROUTERS = (1, 2, 4)
IDLE_ENDPOINTS = 100
SECTIONS = ("prompts", "chunks", "duplex", "routers", "idle")
TRANSPORTS: tuple[Transport, ...] = ("h2", "grpc")
DUPLEX_RATE = 100.0
_RAMP_S = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The durations and numbers of the measurements. ``rate`` is the requests per second of the open loops.

    One router is measured with each of ``transports``, several routers and routers with Redis with the first one.
    ``peer`` is the program of llm-d's endpoint picker, if there is one.
    """

    sections: tuple[str, ...]
    transports: tuple[Transport, ...]
    rounds: int
    seconds: float
    idle_s: float
    connections: int
    rate: float
    peer: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One kind of load. ``chunks`` is 0 for a JSON answer. ``rate`` is 0 for a closed loop."""

    section: str
    prompt_kb: int
    chunks: int
    rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One stack under one load in one round. ``messages`` counts Envoy's messages to the picker per request."""

    cell: Cell
    stack: str
    round: int
    messages: float
    result: Result

    def cpu_us(self, process: str) -> float:
        """Return the CPU microseconds per request of the processes with names that begin with ``process``."""
        spent = sum(spent for name, spent in self.result.cpu_s.items() if name.startswith(process))
        return spent / max(1, self.result.requests) * 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Idle:
    """Cores used by the processes of an idle stack."""

    stack: str
    endpoints: int
    seconds: float
    router: float
    envoy: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """All samples of one run."""

    plan: Plan
    samples: tuple[Sample, ...]
    idle: tuple[Idle, ...]


class Experiment:
    """One run of the benchmark. ``say`` receives each line of progress."""

    def __init__(self, plan: Plan, folder: Path, say: Callable[[str], None]) -> None:
        self._plan = plan
        self._folder = folder
        self._say = say
        self._samples: list[Sample] = []
        self._idle: list[Idle] = []
        self._firsts = count(0, 1_000_000)

    async def run(self) -> Measured:
        """Measure every section. Raises BenchError and ChildError."""
        wanted = self._plan.sections
        if "prompts" in wanted or "chunks" in wanted:
            await self._one_router()
        if "duplex" in wanted:
            await self._full_duplex()
        if "routers" in wanted:
            await self._several_routers()
        if "idle" in wanted:
            await self._at_rest()
        return Measured(plan=self._plan, samples=tuple(self._samples), idle=tuple(self._idle))

    async def _one_router(self) -> None:
        rate, wanted = self._plan.rate, self._plan.sections
        async with self._lab("one") as lab:
            stacks = [
                await lab.envoy_alone(ALONE),
                await lab.trivial(TRIVIAL),
                *[await lab.routers(one_router(each), 1, transport=each) for each in self._plan.transports],
                await lab.routers(REDIS, 1, redis=True, transport=self._plan.transports[0]),
            ]
            if "prompts" in wanted:
                sizes = [(size, pace) for size in SIZES_KB for pace in (0, rate)]
                cells = [Cell(section="prompts", prompt_kb=size, chunks=0, rate=pace) for size, pace in sizes]
                await self._rounds(lab, [*stacks, *await self._peers(lab)], cells)
            if "chunks" in wanted:
                cells = [
                    Cell(section="chunks", prompt_kb=1, chunks=chunks, rate=rate)
                    for chunks in (FEW_CHUNKS, MANY_CHUNKS)
                ]
                await self._rounds(lab, stacks, cells)

    async def _full_duplex(self) -> None:
        """Measure Envoys that send both bodies through the picker, at a rate and as fast as all processes allow."""
        cells = [Cell(section="duplex", prompt_kb=1, chunks=MANY_CHUNKS, rate=rate) for rate in (DUPLEX_RATE, 0)]
        async with self._lab("duplex") as lab:
            stacks = [await lab.envoy_alone(ALONE), await lab.trivial(TRIVIAL, full_duplex=True)]
            for each in self._plan.transports:
                stacks.append(await lab.routers(one_router(each), 1, transport=each, full_duplex=True))
            await self._rounds(lab, [*stacks, *await self._peers(lab)], cells)

    async def _peers(self, lab: Lab) -> list[Stack]:
        """Start llm-d's endpoint picker, if the plan has it."""
        return [await lab.peer(PEER, self._plan.peer)] if self._plan.peer else []

    async def _several_routers(self) -> None:
        async with self._lab("several") as lab:
            stacks = [await lab.trivial(TRIVIAL)]
            stacks += [await self._several(lab, number) for number in ROUTERS]
            await self._rounds(lab, stacks, [Cell(section="routers", prompt_kb=1, chunks=0, rate=0)])

    async def _several(self, lab: Lab, number: int) -> Stack:
        return await lab.routers(several(number), number, redis=True, transport=self._plan.transports[0])

    async def _at_rest(self) -> None:
        async with self._lab("idle") as lab:
            transport = self._plan.transports[0]
            stack = await lab.routers(REDIS, 1, redis=True, members=IDLE_ENDPOINTS, transport=transport)
            # Send requests first: in operation, an idle router has served requests before.
            await self._measure(lab, stack, Cell(section="idle", prompt_kb=1, chunks=0, rate=self._plan.rate), 0)
            await asyncio.sleep(1.0)
            self._say(f"idle: {IDLE_ENDPOINTS} endpoints for {self._plan.idle_s:g} s")
            pids = (*stack.pickers, stack.envoy)
            before = [cpu_s(pid) for pid in pids]
            await asyncio.sleep(self._plan.idle_s)
            router, envoy = ((cpu_s(pid) - then) / self._plan.idle_s for pid, then in zip(pids, before, strict=True))
            self._idle.append(
                Idle(stack=REDIS, endpoints=IDLE_ENDPOINTS, seconds=self._plan.idle_s, router=router, envoy=envoy)
            )

    @asynccontextmanager
    async def _lab(self, name: str) -> AsyncIterator[Lab]:
        folder = self._folder / name
        folder.mkdir()
        async with Children(folder / "logs") as children:
            lab = Lab(children, folder)
            await lab.start()
            yield lab

    async def _rounds(self, lab: Lab, stacks: Sequence[Stack], cells: Sequence[Cell]) -> None:
        for stack in stacks:
            # The first round warms up interpreter, connections and caches. The samples of the first round are dropped.
            self._say(f"warming up: {stack.name}")
            for cell in cells:
                if not cell.rate:
                    await self._measure(lab, stack, cell, 0)
        for number in range(1, self._plan.rounds + 1):
            for cell in cells:
                for stack in stacks:
                    sample = await self._measure(lab, stack, cell, number)
                    self._samples.append(sample)
                    self._say(self._line(sample))

    async def _measure(self, lab: Lab, stack: Stack, cell: Cell, number: int) -> Sample:
        before = await stack.counts()
        result = await lab.load.run(
            Job(
                port=stack.port,
                connections=self._plan.connections,
                rate=cell.rate,
                seconds=self._plan.seconds,
                ramp_s=_RAMP_S,
                prompt_bytes=cell.prompt_kb * 1024,
                chunks=cell.chunks,
                # Every measurement has new conversations, so that no engine has cached their prompts.
                first=next(self._firsts),
                pids=stack.pids,
            )
        )
        after = await stack.counts()
        if result.errors:
            raise BenchError(f"{stack.name}: {result.errors} of {result.sent} requests did not get status 200")
        if after.unasked > before.unasked:
            raise BenchError(f"{stack.name}: Envoy bypassed the picker for {after.unasked - before.unasked} requests")
        if stack.pickers and after.streams - before.streams < result.sent:
            raise BenchError(f"{stack.name}: the picker received fewer requests than the clients sent ({result.sent})")
        messages = (after.messages - before.messages) / result.sent
        return Sample(cell=cell, stack=stack.name, round=number, messages=messages, result=result)

    def _line(self, sample: Sample) -> str:
        cell, result = sample.cell, sample.result
        answer = f"{cell.chunks} chunks" if cell.chunks else "JSON"
        pace = f"{cell.rate:g}/s" if cell.rate else "closed loop"
        return (
            f"{cell.section} {sample.round}/{self._plan.rounds}: {cell.prompt_kb} KB, {answer}, {pace}, {sample.stack}"
            f": {result.requests / result.seconds:.0f} requests/s, picker {sample.cpu_us('picker'):.0f} us a request"
        )


def one_router(transport: Transport) -> str:
    """Return the name of the stack with one router that serves with this transport."""
    return f"1 router, {transport}"


def several(number: int) -> str:
    """Return the name of the stack with this number of routers that share a Redis."""
    return f"{number} router{'s' if number > 1 else ''} with Redis"
