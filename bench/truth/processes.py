"""Measures the case of small caches with processes: simulated engines, a router, Envoy, and KV events over ZeroMQ.

A further engine renders the prompts to token ids and receives no other requests. The times are wall-clock times,
multiplied by the speed of the engines. The router has no switch to ignore the engines' usage, so records without usage
are not measured here.
"""

import asyncio
import json
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import nan
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import aiohttp
import click
from bench.gateway.stacks import HOST, START_S, BenchError, Lab, module
from bench.truth.cases import RATES, SMALL_TOKENS, Knowledge
from bench.truth.measures import WARMUP

from dualmap_cli.demo.children import Child, Children
from dualmap_cli.demo.errors import ChildError
from dualmap_cli.demo.plan import MODEL, PRESET, SLO_TTFT_S, Plan, make_plan, pool_document
from dualmap_cli.demo.replay import chat_body, read_usage
from dualmap_sim.summary import percentile
from dualmap_sim.workloads.trace import TraceRequest

ENGINES: Final = 8
REQUESTS: Final = 600
QUICK_ENGINES: Final = 3
QUICK_REQUESTS: Final = 20
SPEED: Final = 2.0
"""Seconds of the engines' time per second. All processes share the machine, so a higher speed distorts the times."""
KINDS: Final = (Knowledge.NONE, Knowledge.USAGE, Knowledge.EVENTS)
_LIVE_WITHIN_S: Final = 60.0
_REQUEST_S: Final = 120.0
_TAIL_BYTES: Final = 4096
_RECEIPT: Final = "x-dualmap-decision"
_MATCHED: Final = re.compile(r"\bmatched=(\d+)")
_TOKENIZE: Final = re.compile(r"^dualmap_tokenize_seconds_(sum|count)\{[^}]*\} (\S+)$", re.MULTILINE)
_SOURCE: Final = re.compile(r"\bsource=\"events\"")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """One request: its TTFT in the engines' time, and its cached tokens as predicted and as reported by the engine."""

    ttft_s: float | None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    predicted_tokens: int = 0
    by_events: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The requests of a run, and the router's mean time to get a prompt's token ids, which is part of the TTFT."""

    answers: Sequence[Answered]
    tokenize_s: float


class _Engines(Lab):
    """The processes of one kind of knowledge."""

    def __init__(self, children: Children, folder: Path, plan: Plan, knowledge: Knowledge) -> None:
        super().__init__(children, folder)
        self._plan = plan
        self._knowledge = knowledge
        self._renderer = ""

    async def start(self) -> None:
        """Start the engines. All publish KV events, so that all kinds of knowledge have the same engines."""
        names = ["renderer", *(f"engine-{number}" for number in range(self._plan.engines))]
        started = [await self._children.start(name, self._command()) for name in names]
        self._renderer, *engines = [await _address(child) for child in started]
        self._engines = tuple(engines)

    def _command(self) -> tuple[str, ...]:
        return module(
            *("dualmap_cli", "engine-sim", "--host", HOST, "--port", "0", "--model", MODEL, "--preset", PRESET),
            *("--speed", f"{self._plan.speed:g}", "--cache-tokens", str(SMALL_TOKENS["default"])),
            *("--kv-events", "--kv-events-port", "0", "--kv-events-replay-port", "0"),
        )

    def _pool(self, tag: str, members: int = ENGINES) -> Path:
        policy = "round_robin" if self._knowledge is Knowledge.NONE else "dualmap"
        engines = {f"engine-{number}": address for number, address in enumerate(self._engines[:members])}
        document: dict[str, Any] = pool_document(self._plan, policy, engines)
        # The router reads the size of the caches from the engines.
        engine: dict[str, Any] = {"prefillTokensPerSecond": self._plan.engine.prefill.tokens_per_s * self._plan.speed}
        if self._knowledge is Knowledge.EVENTS:
            engine |= {
                "kvEvents": {"enabled": True},
                "tokenizer": {"source": "Renderer", "url": f"http://{self._renderer}"},
            }
        document["spec"]["engine"] = engine
        document["spec"]["routing"]["prefix"]["blockTokens"] = self._plan.engine.block_tokens
        path = self._folder / f"{tag}.json"
        path.write_text(json.dumps(document, indent=2))
        return path


def measure_processes(*, quick: bool, json_file: Path | None) -> None:
    """Run every kind of knowledge, and print a table."""
    engines, requests = (QUICK_ENGINES, QUICK_REQUESTS) if quick else (ENGINES, REQUESTS)
    found: dict[Knowledge, Measured] = {}
    try:
        with tempfile.TemporaryDirectory(prefix="dualmap-bench-") as temporary:
            plan = _plan(engines, requests, Path(temporary))
            for knowledge in KINDS:
                click.echo(f"{knowledge}: {requests} requests", err=True)
                found[knowledge] = asyncio.run(_run(plan, knowledge, Path(temporary) / knowledge.name.lower()))
    except (BenchError, ChildError) as error:
        click.echo(f"bench truth: {error}", err=True)
        sys.exit(1)
    rows = {knowledge: _figures(measured, plan.engine.block_tokens) for knowledge, measured in found.items()}
    click.echo(_table(rows))
    if json_file is not None:
        samples = {str(knowledge): [asdict(each) for each in measured.answers] for knowledge, measured in found.items()}
        json_file.write_text(json.dumps(samples, indent=1))


def _plan(engines: int, requests: int, folder: Path) -> Plan:
    return make_plan(
        engines=engines,
        routers=1,
        policies=("dualmap",),
        trace_file=None,
        requests=requests,
        rate=RATES["default"] * engines / ENGINES,
        speed=SPEED,
        seed=0,
        out=folder,
    )


async def _run(plan: Plan, knowledge: Knowledge, folder: Path) -> Measured:
    async with Children(folder / "logs") as children:
        lab = _Engines(children, folder, plan, knowledge)
        await lab.start()
        stack = await lab.routers("router", 1, members=plan.engines)
        if knowledge is Knowledge.EVENTS:
            await _followed(stack.addresses[0]["metrics"])
        answers = await children.guard(_replay(plan, f"http://{HOST}:{stack.port}"))
        return Measured(answers=answers, tokenize_s=await _tokenize_s(stack.addresses[0]["metrics"]))


async def _tokenize_s(metrics: str) -> float:
    """Return the router's mean time to get a prompt's token ids, 0 without token ids."""
    async with aiohttp.ClientSession() as session, session.get(f"http://{metrics}/metrics") as response:
        totals = {"sum": 0.0, "count": 0.0}
        for name, value in _TOKENIZE.findall(await response.text()):
            totals[name] += float(value)
    return totals["sum"] / totals["count"] if totals["count"] else 0.0


async def _followed(metrics: str) -> None:
    """Wait until the router is subscribed to the engines."""
    async with asyncio.timeout(_LIVE_WITHIN_S), aiohttp.ClientSession() as session:
        while True:
            async with session.get(f"http://{metrics}/pools/demo/{MODEL}") as response:
                endpoints = (await response.json())["endpoints"]
            states = [each["engine"].get("events", {}).get("state") for each in endpoints]
            if all(state in ("Syncing", "Live") for state in states):
                return
            await asyncio.sleep(0.2)


async def _replay(plan: Plan, url: str) -> Sequence[Answered]:
    """Send the requests at their arrival times."""
    trace, loop = plan.trace.sped_up(plan.speed), asyncio.get_running_loop()
    timeout = aiohttp.ClientTimeout(total=_REQUEST_S)
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session,
        asyncio.TaskGroup() as group,
    ):
        began_s, tasks = loop.time(), []
        for request in trace.requests:
            await asyncio.sleep(began_s + request.arrival_s - loop.time())
            tasks.append(group.create_task(_ask(session, url, request, trace.block_tokens, plan.speed)))
    return [task.result() for task in tasks]


async def _ask(
    session: aiohttp.ClientSession, url: str, request: TraceRequest, block_tokens: int, speed: float
) -> Answered:
    body = chat_body(request, model=MODEL, block_tokens=block_tokens)
    clock = asyncio.get_running_loop().time
    sent_s, first_s, tail = clock(), None, b""
    headers = {"content-type": "application/json"}
    try:
        async with session.post(f"{url}/v1/chat/completions", data=body, headers=headers) as response:
            async for chunk in response.content.iter_any():
                first_s = first_s or clock()
                tail = (tail + chunk)[-_TAIL_BYTES:]
            receipt = response.headers.get(_RECEIPT, "")
            served = response.status == 200
    except (TimeoutError, aiohttp.ClientError):
        return Answered(ttft_s=None)
    if not served or first_s is None:
        return Answered(ttft_s=None)
    prompt_tokens, cached_tokens = read_usage(tail)
    matched = _MATCHED.search(receipt)
    return Answered(
        ttft_s=(first_s - sent_s) * speed,
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        predicted_tokens=int(matched[1]) if matched else 0,
        by_events=_SOURCE.search(receipt) is not None,
    )


def _figures(measured: Measured, block_tokens: int) -> Mapping[str, float]:
    counted = measured.answers[int(WARMUP * len(measured.answers)) :]
    served = [each for each in counted if each.ttft_s is not None]
    expected = [each for each in served if each.predicted_tokens]
    predicted = sum(each.predicted_tokens for each in served)
    ttft_s = sorted(each.ttft_s for each in served if each.ttft_s is not None)
    return {
        "hit rate %": 100 * _share(sum(each.cached_tokens for each in served), sum(e.prompt_tokens for e in served)),
        "stale %": 100 * _share(sum(not each.cached_tokens for each in expected), len(expected)),
        "excess %": 100 * _share(sum(max(0, each.predicted_tokens - each.cached_tokens) for each in served), predicted),
        "off %": 100
        * _share(sum(abs(e.predicted_tokens - e.cached_tokens) > block_tokens for e in served), len(served)),
        "TTFT p50 s": percentile(ttft_s, 0.5),
        "p90 s": percentile(ttft_s, 0.9),
        "mean s": fmean(ttft_s) if ttft_s else nan,
        "within SLO %": 100 * _share(sum(each <= SLO_TTFT_S for each in ttft_s), len(counted)),
        "by events %": 100 * _share(sum(each.by_events for each in served), len(served)),
        "token ids ms": 1000 * measured.tokenize_s,
    }


def _share(part: float, whole: float) -> float:
    return part / whole if whole else nan


def _table(rows: Mapping[Knowledge, Mapping[str, float]]) -> str:
    names = list(next(iter(rows.values())))
    lines = [f"| knowledge | {' | '.join(names)} |", f"|---|{'---:|' * len(names)}"]
    for knowledge, figures in rows.items():
        lines.append(f"| {knowledge} | {' | '.join(f'{value:.2f}' for value in figures.values())} |")
    return "\n".join(lines)


async def _address(child: Child) -> str:
    return (await child.ready(within_s=START_S))["http"]
