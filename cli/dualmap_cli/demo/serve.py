"""``dualmap demo --serve``: runs one policy's stack and repeats the workload, so that users can watch the dashboard.

With this option, the demo measures nothing: the routers' dashboards show the state. The demo ends on SIGINT or SIGTERM.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

from dualmap_cli.demo.children import Children
from dualmap_cli.demo.experiment import logs_folder, request_deadline_s
from dualmap_cli.demo.plan import MODEL, Plan
from dualmap_cli.demo.replay import replay
from dualmap_cli.demo.stack import Stack, start_stack
from dualmap_sim.workloads.trace import Trace


async def serve(plan: Plan, ready: Callable[[Stack], None]) -> None:
    """Start the stack of the plan's last run, call ``ready``, and send traffic until cancelled.

    Raises DemoError. All processes end, also after an error.
    """
    run = plan.runs[-1]
    folder = logs_folder(plan, run)
    with TemporaryDirectory(prefix="dualmap-") as sockets:
        async with Children(folder) as children:
            stack = await start_stack(children, plan, run, folder, Path(sockets))
            ready(stack)
            await children.guard(_send_rounds(plan, stack))


async def _send_rounds(plan: Plan, stack: Stack) -> None:
    """Send the workload in rounds. A round begins after the last request of the previous round was sent."""
    trace = plan.trace.sped_up(plan.speed)
    # The gap between two rounds equals the mean gap between requests, so that the rate stays constant.
    round_s = trace.duration_s * (1 + 1 / len(trace.requests)) or plan.wall_s(1 / plan.rate)
    async with asyncio.TaskGroup() as rounds:
        for number in count():
            begins_s = asyncio.get_running_loop().time()
            sending = replay(
                stack.url,
                MODEL,
                reworded(trace, number),
                deadline_s=request_deadline_s(plan),
                finished=lambda: None,
            )
            rounds.create_task(sending)
            await asyncio.sleep(begins_s + round_s - asyncio.get_running_loop().time())


def reworded(trace: Trace, number: int) -> Trace:
    """Return the trace with prompts of the same lengths and shared prefixes, but new text for each ``number``.

    So a round cannot reuse cached blocks of an earlier round.
    """
    most = 1 + max(block for request in trace.requests for block in request.blocks)
    requests = (
        replace(request, blocks=tuple(block + number * most for block in request.blocks)) for request in trace.requests
    )
    return replace(trace, requests=tuple(requests))
