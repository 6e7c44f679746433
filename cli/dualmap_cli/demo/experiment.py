"""Runs the policies one after another with the same workload, each on a new stack of processes."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, Protocol

from dualmap_cli.demo.children import Children
from dualmap_cli.demo.plan import MODEL, Plan, Run
from dualmap_cli.demo.predictions import EventCounts, read_event_counts
from dualmap_cli.demo.replay import Outcome, replay
from dualmap_cli.demo.report import PolicyRun
from dualmap_cli.demo.sampling import LoadSample, metrics_pages, sample_until_cancelled, wait_until_idle
from dualmap_cli.demo.stack import Stack, start_stack

_SAMPLE_EVERY_WALL_S: Final = 0.25
_REQUEST_DEADLINE_S: Final = 300.0
"""The maximum duration of a request in model seconds."""
_REQUEST_DEADLINE_WALL_S_LEAST: Final = 20.0
"""A lower limit of the maximum duration in wall-clock seconds, because Envoy and the router have a fixed speed."""


class Progress(Protocol):
    """The callbacks for the experiment's progress."""

    def starting(self, run: str) -> None:
        """Report that the stack of a run starts."""

    def replaying(self, run: str) -> None:
        """Report that the replay of the requests begins."""

    def finished_one(self) -> None:
        """Report that a request has ended."""


def logs_folder(plan: Plan, run: Run) -> Path:
    """Return the folder for the logs of a run."""
    return plan.out / "logs" / run.name


def request_deadline_s(plan: Plan) -> float:
    """Return the maximum duration of a request, in wall-clock seconds."""
    return max(_REQUEST_DEADLINE_WALL_S_LEAST, plan.wall_s(_REQUEST_DEADLINE_S))


async def run_all(plan: Plan, progress: Progress) -> tuple[PolicyRun, ...]:
    """Do every run of the plan. Raises DemoError. All processes end, also after an error."""
    return tuple([await _run(plan, run, progress) for run in plan.runs])


async def _run(plan: Plan, run: Run, progress: Progress) -> PolicyRun:
    began_s = time.monotonic()
    progress.starting(run.name)
    folder = logs_folder(plan, run)
    with TemporaryDirectory(prefix="dualmap-") as sockets:
        outcomes, samples, events = await _replay(plan, run, progress, folder, Path(sockets))
    return PolicyRun(
        policy=run.name,
        outcomes=outcomes,
        samples=tuple(samples),
        wall_s=time.monotonic() - began_s,
        events=events if run.kv_events else None,
    )


async def _replay(
    plan: Plan, run: Run, progress: Progress, folder: Path, sockets: Path
) -> tuple[tuple[Outcome, ...], list[LoadSample], EventCounts]:
    async with Children(folder) as children:
        stack = await start_stack(children, plan, run, folder, sockets)
        progress.replaying(run.name)
        return await children.guard(_load(plan, stack, progress.finished_one))


async def _load(
    plan: Plan, stack: Stack, finished_one: Callable[[], None]
) -> tuple[tuple[Outcome, ...], list[LoadSample], EventCounts]:
    """Replay the workload while sampling the routers' load gauges; read the routers' KV events at the end."""
    samples: list[LoadSample] = []
    sampler = asyncio.ensure_future(
        sample_until_cancelled(stack.metrics_urls, endpoints=plan.engines, every_s=_SAMPLE_EVERY_WALL_S, into=samples)
    )
    try:
        outcomes = await replay(
            stack.url,
            MODEL,
            plan.trace.sped_up(plan.speed),
            deadline_s=request_deadline_s(plan),
            finished=finished_one,
        )
    finally:
        sampler.cancel()
        await asyncio.gather(sampler, return_exceptions=True)
    if plan.record:
        await wait_until_idle(stack.metrics_urls)
    return outcomes, samples, read_event_counts(await metrics_pages(stack.metrics_urls))
