"""Prefill and decode apart beside a joint pool, in virtual time: the same eight engines in each row.

joint: every engine prefills and decodes, and the policy dualmap chooses one.
static P+D: the policy chooses among the P engines that prefill; the engine with the fewest KV tokens decodes.
two pools P+D: the policy chooses a member of each pool, and prompts with few uncached tokens stay at the decode member.

KV moves at 100,000 tokens per second. TPOT is the time per output token after the first.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Final

import click
from bench.paper.measures import tpot_figures
from bench.paper.settings import CONVERSATION, TOOL_AGENT, TRACE

from dualmap_sim.experiment import Experiment, Outcome, run_experiment
from dualmap_sim.presets import PRESETS
from dualmap_sim.workloads.catalog import Workload

INSTANCES: Final = 8
TRANSFER_TOKENS_PER_S: Final = 100_000.0
REQUESTS: Final = 3000
QUICK_REQUESTS: Final = 300
RATES: Final = {
    (CONVERSATION, "7b"): (2.0, 3.0),
    (CONVERSATION, "14b"): (1.0, 1.5),
    (TOOL_AGENT, "7b"): (6.0, 9.0),
    (TOOL_AGENT, "14b"): (4.0, 6.0),
}
SPLITS: Final = (5, 4, 3)
THRESHOLD_TOKENS: Final = 2048
"""The most uncached tokens of a prompt that decode members compute themselves."""
COLUMNS: Final = (
    "within SLO % | TTFT p50 s | p90 s | TPOT p50 ms | p90 ms | E2E p50 s | hit rate % | "
    "prefilled at the decode member % | rejected %"
)


def rows(base: Experiment, *, quick: bool) -> Iterator[tuple[str, Experiment]]:
    """Yield the rows of a table: a name and an experiment."""
    yield "joint", base
    for prefillers in SPLITS[1:2] if quick else SPLITS:
        name = f"{prefillers}P+{INSTANCES - prefillers}D"
        yield f"static {name}", replace(base, decoders=INSTANCES - prefillers)
        apart = replace(base, prefillers=prefillers)
        yield f"two pools {name}", replace(apart, prefill_min_tokens=THRESHOLD_TOKENS + 1)
        yield f"two pools {name}, threshold 0", replace(apart, prefill_min_tokens=1)


def experiment(workload: str, model: str, rate: float, requests: int) -> Experiment:
    """Return the joint pool at a rate."""
    trace = TRACE if workload == CONVERSATION else None
    return Experiment(
        requests_per_s=rate,
        workload=Workload(name=workload, trace=trace, requests=requests),
        engine=replace(PRESETS[model], pull_tokens_per_s=TRANSFER_TOKENS_PER_S),
        instances=INSTANCES,
        warmup=requests // 6,
        sessions=False,
        sample_s=None,
    )


@click.command()
@click.option("--quick", is_flag=True, help="Measure one rate of each workload with few requests, in half a minute.")
def main(quick: bool) -> None:
    """Compare a joint pool with static splits and with two pools, and print the tables."""
    for (workload, model), rates in RATES.items():
        if workload == CONVERSATION and not TRACE.exists():
            click.echo(f"left out: {workload}, because {TRACE} does not exist", err=True)
            continue
        for rate in rates[-1:] if quick else rates:
            print(f"## {workload}, {model}, {rate:g}/s\n")
            base = experiment(workload, model, rate, QUICK_REQUESTS if quick else REQUESTS)
            _table(rows(base, quick=quick))


def _table(named: Iterable[tuple[str, Experiment]]) -> None:
    print(f"| engines | {COLUMNS} |")
    print(f"|{'---|' * (COLUMNS.count('|') + 2)}")
    for name, each in named:
        print(f"| {name} | {_cells(run_experiment(each))} |", flush=True)
    print()


def _cells(outcome: Outcome) -> str:
    summary, tpot = outcome.summary, tpot_figures(outcome.records)
    local = sum(number for rule, number in summary.rules.items() if not rule.startswith("remote"))
    sent = sum(summary.rules.values())
    apart = any(rule.startswith("remote") for rule in summary.rules)
    return " | ".join(
        (
            f"{100 * summary.slo_attainment:.1f}",
            f"{summary.ttft_p50_s:.2f}",
            f"{summary.ttft_p90_s:.2f}",
            f"{1000 * tpot['tpot_p50_s']:.0f}",
            f"{1000 * tpot['tpot_p90_s']:.0f}",
            f"{summary.e2e_p50_s:.1f}",
            f"{100 * summary.hit_rate:.1f}",
            f"{100 * local / sent:.0f}" if apart else "",
            f"{100 * summary.refused / summary.requests:.1f}",
        )
    )
