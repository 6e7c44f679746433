"""The command ``python -m bench yardstick``: its options, the runs, and the page."""

import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Final

import click
from bench.paper.measuring import commit_of_code
from bench.paper.settings import CONVERSATION_REQUESTS, TRACE
from bench.yardstick.decisions import Agreement, agreements
from bench.yardstick.dynamo_replay import INSTALL, DynamoError, Reported, Router, replay
from bench.yardstick.report import ROUND_ROBIN, Figures, Run, agreement_table, figures, plot, results_table
from bench.yardstick.setting import ENGINES, WARMUP, Costs, paced, requests
from bench.yardstick.simulation import Variant, router_requests, simulate

from dualmap_sim.workloads.mooncake import TraceError
from dualmap_sim.workloads.trace import Trace

PYTHON: Final = Path(__file__).parents[2] / ".dynamo" / "bin" / "python"
_PAGE: Final = Path(__file__).parents[1] / "results" / "yardstick.md"
_QUICK_PAGE: Final = Path("build") / "yardstick" / "yardstick.md"
_QUICK_REQUESTS: Final = 1500
RATES: Final[Mapping[Costs, tuple[float, ...]]] = MappingProxyType(
    {Costs.PREFILL: (16.0, 32.0, 40.0), Costs.LINEAR: (24.0,), Costs.MOCKER: (24.0,)}
)
"""Requests per second. Round robin reaches its knee at the highest rate of equal engines."""
VARIANTS_RATE: Final = 32.0
POLICIES: Final = ("round_robin", "dynamo", "dualmap", "min_ttft")
VARIANTS: Final = MappingProxyType(
    {
        "`round_robin`, no queue": Variant(policy="round_robin", queues=False),
        "`dynamo`, no queue": Variant(policy="dynamo", queues=False),
        "`dynamo`, no queue, KV events": Variant(policy="dynamo", queues=False, kv_events=True),
    }
)
_SAMPLES: Final = 2
"""Runs of Dynamo's KV router with its defaults, which breaks ties at random. All other runs are deterministic."""


@click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.option("--quick", is_flag=True, help=f"Replay {_QUICK_REQUESTS} requests at one rate, as a smoke test.")
@click.option(
    "--dynamo",
    "python",
    default=PYTHON,
    type=click.Path(dir_okay=False, path_type=Path),
    help=f"Python interpreter with ai-dynamo installed; `{INSTALL}` makes the default.",
)
@click.option(
    "--trace",
    default=TRACE,
    type=click.Path(dir_okay=False, path_type=Path),
    help="File of the Conversation trace in Mooncake's format.",
)
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), help="File for the page; the plot is beside it."
)
def yardstick(*, quick: bool, python: Path, trace: Path, out: Path | None) -> None:
    """Compare this router with NVIDIA Dynamo's router in Dynamo's own replay.

    Dynamo replays the first window of the Conversation trace with its simulated engine (mocker), once with its round
    robin and with its KV router. This project's simulator replays the same requests on engines of the same cost, with
    several policies. The page compares TTFT and reuse with round robin in each replay. Round robin sends each request
    to the same engine in both replays, so its two rows show how equal the engines are. The last table shows whether the
    policy `dynamo` decides like Dynamo's router on the same data.

    Dynamo is not a dependency of this project. It has a virtual environment of its own (450 MB):

    \b
      make .dynamo/.installed

    A full benchmark takes about 15 minutes on one core.

    \b
    Example:
      python -m bench yardstick --quick
      python -m bench yardstick
    """
    page = out or (_QUICK_PAGE if quick else _PAGE)
    rates = {Costs.PREFILL: (VARIANTS_RATE,)} if quick else RATES
    try:
        window = requests(trace, _QUICK_REQUESTS if quick else CONVERSATION_REQUESTS)
        measured: dict[Run, list[Figures]] = {}
        agreed: dict[float, Mapping[str, Agreement]] = {}
        for costs, of_costs in rates.items():
            for rate in of_costs:
                asked = paced(window, rate)
                for run, found in _runs(asked, costs, rate, python, agreed):
                    measured.setdefault(run, []).append(found)
                    click.echo(f"{run.costs}, {run.rate:g}/s, {run.system}: {run.router}", err=True)
    except (DynamoError, TraceError) as error:
        click.echo(f"yardstick: {error}", err=True)
        sys.exit(1)
    page.parent.mkdir(parents=True, exist_ok=True)
    plot(page.with_suffix(".png"), measured, Costs.PREFILL)
    tables = "\n".join(f"## {costs}\n\n{results_table(measured, costs)}" for costs in rates)
    page.write_text(
        "# Dynamo's router as a yardstick, measured\n\n"
        f"`python -m bench yardstick{' --quick' if quick else ''}`, run at commit {commit_of_code()} (a + says: with "
        f"changes) on {datetime.now(UTC):%Y-%m-%d}, with ai-dynamo 1.4.2: {len(window.requests)} requests of the "
        f"Conversation trace, of which the first {WARMUP} do not count, and {ENGINES} engines. A figure in parentheses "
        "is relative to round robin of the same replay. docs/evaluation.md explains the figures.\n\n"
        f"{tables}\n## Decisions on the same data\n\n{agreement_table(agreed)}\n![TTFT and reuse]({page.stem}.png)\n"
    )
    click.echo(str(page))


def _runs(
    asked: Trace, costs: Costs, rate: float, python: Path, agreed: dict[float, Mapping[str, Agreement]]
) -> Iterator[tuple[Run, Figures]]:
    """Measure all runs of a rate; add the agreement of decisions on equal engines to ``agreed``."""
    logged = costs is Costs.PREFILL
    yield Run(costs, rate, "Dynamo", ROUND_ROBIN["Dynamo"]), _dynamo(asked, Router.ROUND_ROBIN, costs, python)[0]
    for sample in range(_SAMPLES):
        found, reported = _dynamo(asked, Router.KV, costs, python, logged=logged and not sample)
        if logged and not sample:
            chains = [each.chain for each in router_requests(asked)]
            agreed[rate] = agreements(reported, chains, skipped=WARMUP)
        yield Run(costs, rate, "Dynamo", "KV router"), found
    if costs is Costs.PREFILL and rate == VARIANTS_RATE:
        found, _ = _dynamo(asked, Router.KV_PREFILL, costs, python)
        yield Run(costs, rate, "Dynamo", "KV router, prefill blocks alone"), found
    if costs is Costs.MOCKER:
        policies: Mapping[str, Variant] = {}
    else:
        policies = {f"`{policy}`": Variant(policy=policy) for policy in POLICIES}
        if costs is Costs.PREFILL and rate == VARIANTS_RATE:
            policies = {**policies, **VARIANTS}
    for name, variant in policies.items():
        yield Run(costs, rate, "this project", name), figures(simulate(asked, variant, costs)[WARMUP:])


def _dynamo(
    asked: Trace, router: Router, costs: Costs, python: Path, *, logged: bool = False
) -> tuple[Figures, list[Reported]]:
    with TemporaryDirectory() as folder:
        reported = replay(asked, router, python=python, folder=Path(folder), costs=costs, logged=logged)
    return figures([each.served for each in reported[WARMUP:]]), reported
