"""The command ``python -m bench gateway``: its options, progress on stderr, and tables on stdout."""

import asyncio
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import click
from bench.gateway.experiment import SECTIONS, TRANSPORTS, Experiment, Plan
from bench.gateway.report import Tables
from bench.gateway.stacks import BenchError

from dualmap_cli.demo.errors import ChildError
from dualmap_extproc.settings import Transport

_QUICK_ROUNDS, _QUICK_SECONDS, _QUICK_IDLE_SECONDS = 1, 0.5, 5.0


@click.command(context_settings={"show_default": True})
@click.option(
    "--rounds", default=3, type=click.IntRange(1, 100), help="Number of rounds. Each round measures every stack once."
)
@click.option("--seconds", default=2.0, type=click.FloatRange(0.1, 60), help="Length of one measurement in seconds.")
@click.option(
    "--idle-seconds",
    default=20.0,
    type=click.FloatRange(0.5, 600),
    help="Length of the measurement without requests, in seconds.",
)
@click.option(
    "--connections", default=32, type=click.IntRange(1, 200), help="Number of clients in closed-loop measurements."
)
@click.option(
    "--rate", default=200.0, type=click.FloatRange(1, 10_000), help="Requests per second in open-loop measurements."
)
@click.option(
    "--section",
    "sections",
    multiple=True,
    type=click.Choice(SECTIONS),
    help="Section to measure; repeat for several. Default: all.",
)
@click.option(
    "--transport",
    "transports",
    multiple=True,
    type=click.Choice(TRANSPORTS),
    help="What serves the router's gRPC port; repeat for several. Default: all.",
)
@click.option(
    "--peer",
    type=click.Path(exists=True, dir_okay=False, executable=True, path_type=Path),
    help="Program of llm-d's endpoint picker (llm-d-router) to measure beside the router, not part of this project.",
)
@click.option(
    "--quick",
    is_flag=True,
    help="Measure only one short round, in about three minutes. Overrides --rounds, --seconds and --idle-seconds.",
)
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write every sample to this JSON file."
)
@click.option(
    "--keep",
    type=click.Path(file_okay=False, path_type=Path),
    help="Keep Envoy's configurations and all logs in this folder.",
)
def gateway(
    *,
    rounds: int,
    seconds: float,
    idle_seconds: float,
    connections: int,
    rate: float,
    sections: tuple[str, ...],
    transports: tuple[Transport, ...],
    peer: Path | None,
    quick: bool,
    json_file: Path | None,
    keep: Path | None,
) -> None:
    """Compare these stacks: Envoy with routers, Envoy with a picker that does nothing, and Envoy alone.

    Every round measures every stack once. The tables show the median over the rounds, with the lowest and the highest
    value. Ratios compare measurements of the same round. A full benchmark takes about eight minutes.

    \b
    Example:
      python -m bench gateway
      python -m bench gateway --section prompts --rounds 5 --json prompts.json
    """
    plan = Plan(
        sections=sections or SECTIONS,
        transports=transports or TRANSPORTS,
        rounds=_QUICK_ROUNDS if quick else rounds,
        seconds=_QUICK_SECONDS if quick else seconds,
        idle_s=_QUICK_IDLE_SECONDS if quick else idle_seconds,
        connections=connections,
        rate=rate,
        peer=peer,
    )
    began, before = time.monotonic(), _load()
    try:
        with tempfile.TemporaryDirectory(prefix="dualmap-bench-") as temporary:
            folder = keep or Path(temporary)
            folder.mkdir(parents=True, exist_ok=True)
            measured = asyncio.run(Experiment(plan, folder, lambda line: click.echo(line, err=True)).run())
    except (BenchError, ChildError, FileExistsError) as error:
        click.echo(f"bench gateway: {error}", err=True)
        sys.exit(1)
    machine = (
        f"machine: {os.cpu_count()} cores; load average {before} before, {_load()} after; "
        f"{time.monotonic() - began:.0f} s (figures are comparable within this run only)"
    )
    click.echo(f'`make bench ARGS="{" ".join(sys.argv[1:])}"`\n\n{machine}\n\n{Tables(measured).markdown()}')
    if json_file is not None:
        json_file.write_text(json.dumps({"machine": machine, **asdict(measured)}, indent=1, default=str))


def _load() -> str:
    return ", ".join(f"{each:.1f}" for each in os.getloadavg())
