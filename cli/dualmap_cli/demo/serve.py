"""``dualmap demo --serve``: one policy's stack with the workload on it, round after round, for people to look at.

Nothing is measured: the routers' dashboards show what happens. It ends on SIGINT or SIGTERM.
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
    """Start the stack of the plan's last policy, call ``ready``, and send traffic until cancelled.

    Raises DemoError; leaves no process behind, however it ends.
    """
    policy = plan.policies[-1]
    folder = logs_folder(plan, policy)
    with TemporaryDirectory(prefix="dualmap-") as sockets:
        async with Children(folder) as children:
            stack = await start_stack(children, plan, policy, folder, Path(sockets))
            ready(stack)
            await children.guard(_send_rounds(plan, stack))


async def _send_rounds(plan: Plan, stack: Stack) -> None:
    """Send the workload; a round begins when the last request of the one before has left, not when all have ended."""
    trace = plan.trace.sped_up(plan.speed)
    # One more gap at the end, as between two requests, so that the rate stays what it is.
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
    """Return the trace with prompts of the same lengths and shared prefixes, but other words for each ``number``.

    What one round left in the engines' caches shall be of no use to the next, as if other people came.
    """
    most = 1 + max(block for request in trace.requests for block in request.blocks)
    requests = (
        replace(request, blocks=tuple(block + number * most for block in request.blocks)) for request in trace.requests
    )
    return replace(trace, requests=tuple(requests))
