"""python -m bench kv_store: a KV store that 8 engines share, against their own caches, in virtual time.

Llumnix' documentation says that its scheduler asks the store's metadata service for the chunks of each prompt, and
gives no figures. The store keeps every prompt and answers at once, so its figures are upper bounds. Each policy serves
the same requests with and without the store; without it, an engine has only its own cache.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Final

import click
from bench.paper.settings import CONVERSATION, TITLES, TOOL_AGENT, TRACE, Extent

from dualmap_sim.experiment import run_experiment
from dualmap_sim.shared_store import StoreConfig

_POLICIES: Final = ("round_robin", "llumnix", "dualmap")
_RATES: Final = {CONVERSATION: (1.0, 2.0, 2.75), TOOL_AGENT: (2.0, 4.0, 6.0)}
"""The rates of ``bench paper --section llumnix``: low, medium, and one that overloads round robin without a store."""
_FETCHES: Final = (20_000.0, 200_000.0)
"""Tokens per second; 7B models have about 57 KB of KV per token, so 1.1 and 11 GB/s."""
_HEADS: Final = (
    *("workload", "requests/s", "policy", "store tokens/s"),
    *("TTFT mean s", "p50", "p90", "own cache", "fetched", "within SLO"),
)


@click.command()
@click.option("--quick", is_flag=True, help="One rate of each workload, with fewer requests.")
@click.option("--requests", type=click.IntRange(600), default=None, help="Requests of each run.")
@click.option("--trace", type=click.Path(path_type=Path), default=TRACE, help="The Conversation trace.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per run.")
def kv_store(quick: bool, requests: int | None, trace: Path, as_json: bool) -> None:
    """Compare a shared store with the engines' own caches."""
    extent = Extent(quick=quick, trace=trace)
    if not as_json:
        print(f"| {' | '.join(_HEADS)} |")
        print(f"|{'---|' * len(_HEADS)}")
    for workload in extent.workloads:
        for rate in _RATES[workload][1:2] if quick else _RATES[workload]:
            for policy in _POLICIES:
                for fetches in (None, *_FETCHES):
                    row = _row(extent, workload, rate, policy, fetches, requests)
                    print(json.dumps(row) if as_json else f"| {' | '.join(row.values())} |", flush=True)


def _row(
    extent: Extent, workload: str, rate: float, policy: str, fetches: float | None, requests: int | None
) -> dict[str, str]:
    experiment = extent.experiment(workload, "7b", 0, policy, rate)
    if requests is not None:
        experiment = replace(experiment, workload=replace(experiment.workload, requests=requests))
    if fetches is not None:
        experiment = replace(experiment, store=StoreConfig(tokens_per_s=fetches))
    outcome = run_experiment(experiment)
    counted = [each for each in outcome.records[experiment.warmup :] if each.ttft_s is not None]
    prompt_tokens = sum(each.arrival.work.prompt_tokens for each in counted)
    mean_s = sum(each.ttft_s or 0.0 for each in counted) / len(counted)
    cells = (
        TITLES[workload],
        f"{rate:g}",
        policy,
        "none" if fetches is None else f"{fetches:,.0f}",
        f"{mean_s:.2f}",
        f"{outcome.summary.ttft_p50_s:.2f}",
        f"{outcome.summary.ttft_p90_s:.2f}",
        f"{100 * sum(each.cached_tokens for each in counted) / prompt_tokens:.1f} %",
        f"{100 * sum(each.pulled_tokens for each in counted) / prompt_tokens:.1f} %",
        f"{100 * outcome.summary.slo_attainment:.1f} %",
    )
    return dict(zip(_HEADS, cells, strict=True))
