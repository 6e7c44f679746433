"""The router's own cost (DualMap paper, appendix A.3.2, Fig. 13b): time of a decision, of rebalancing, and its memory.

Unlike in other sections, the figures are wall-clock times of this machine, comparable within one run only.
``bench/results/core.md`` has more of such figures.
"""

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import quantiles
from typing import Final
from unittest.mock import patch

from bench.decisions import PROMPT_BYTES, cost, prompts
from bench.memory import bytes_per_block, conversations, tree_indexes
from bench.paper.cells import Cell, Figures
from bench.paper.claims import Claim
from bench.paper.measures import timed
from bench.paper.results import Results
from bench.paper.section import Section
from bench.paper.settings import TOOL_AGENT, Extent
from bench.paper.tables import number, table

from dualmap.queue.rebalance import relieve
from dualmap.router import PoolRouter
from dualmap_sim.experiment import run_experiment

_SIZES: Final = (8, 32, 256)
_POLICIES: Final = ("min_ttft", "least_loaded", "dualmap_paper", "dualmap")
_PROMPT: Final = "64 KB"
_OURS: Final = ("dualmap_paper", "dualmap")
_RATE: Final = 8.5
_PAPER_BLOCKS: Final = 9632
"""Blocks of 128 tokens in 64 GB of KV cache of Qwen2.5 7B (appendix A.3.2)."""
_PAPER_BLOCK_BYTES: Final = 16


def decision(members: int, policy: str) -> Figures:
    """Return the microseconds of a decision on a prompt of 16,000 tokens, with idle members and with loaded members."""
    chains = prompts(PROMPT_BYTES[_PROMPT])
    idle, loaded = (cost(members, policy, chains, loaded=each) for each in (False, True))
    return {"idle_us": idle.decide_us, "loaded_us": loaded.decide_us, "events_us": idle.events_us}


def in_a_run(extent: Extent, policy: str) -> Figures:
    """Return the microseconds of decisions and rebalancing rounds in an overloaded run of Tool&Agent."""
    decisions_s: list[float] = []
    rounds_s: list[float] = []
    experiment = extent.experiment(TOOL_AGENT, "7b", 0, policy, _RATE)
    with (
        patch.object(PoolRouter, "on_request", timed(PoolRouter.on_request, decisions_s, time.perf_counter)),
        patch("dualmap.dispatcher.relieve", timed(relieve, rounds_s, time.perf_counter)),
    ):
        run_experiment(experiment)
    return {
        **{f"decide_{name}": each for name, each in _percentiles_us(decisions_s).items()},
        **{f"round_{name}": each for name, each in _percentiles_us(rounds_s).items()},
        "decisions": len(decisions_s),
        "rounds": len(rounds_s),
    }


def memory() -> Figures:
    """Return the bytes of the index per cached block, with the prompts of conversations."""
    return {"bytes_per_block": bytes_per_block(conversations, tree_indexes)}


def _percentiles_us(times_s: Sequence[float]) -> dict[str, float | None]:
    if len(times_s) < 2:
        return {"p50_us": None, "p90_us": None}
    cuts = quantiles(times_s, n=100)
    return {"p50_us": cuts[49] * 1e6, "p90_us": cuts[89] * 1e6}


def _decision_cell(members: int, policy: str) -> Cell:
    return Cell(
        section="overhead",
        name=f"decision {members} members {policy}",
        policy=policy,
        measure=partial(decision, members, policy),
    )


def _run_cell(extent: Extent, policy: str) -> Cell:
    return Cell(section="overhead", name=f"in a run {policy}", policy=policy, measure=partial(in_a_run, extent, policy))


def _heldcell() -> Cell:
    return Cell(section="overhead", name="memory", policy="index", measure=memory)


def _cells(extent: Extent) -> Sequence[Cell]:
    decisions = [_decision_cell(members, policy) for policy in _POLICIES for members in _SIZES]
    return [_heldcell(), *decisions, *(_run_cell(extent, policy) for policy in _OURS)]


def _page(results: Results, extent: Extent, _plots: Path) -> str:
    rows = []
    for policy in (*_OURS, *_POLICIES[:2]):
        cells = [results.figures(_decision_cell(members, policy)) for members in _SIZES]
        rows.append(
            [
                policy,
                *(
                    "-"
                    if each is None
                    else f"{each['idle_us']:.0f} / {each['loaded_us']:.0f} ({each['events_us']:.0f})"
                    for each in cells
                ),
            ]
        )
    heads = ("policy", *(f"{members} instances" for members in _SIZES))
    text = (
        "Microseconds per decision, prompt of 16,000 tokens, all idle / all loaded (first token and end together):\n\n"
    )
    text += table(heads, rows)
    rows = []
    for policy in _OURS:
        figures = results.figures(_run_cell(extent, policy))
        if figures is not None:
            columns = ("decide_p50_us", "decide_p90_us", "round_p50_us", "round_p90_us")
            rows.append(
                [
                    policy,
                    f"{figures['decisions']:,}",
                    f"{figures['rounds']:,}",
                    *(number(figures[each], 0) for each in columns),
                ]
            )
    text += f"\nIn a run of Tool&Agent at {_RATE:g}/s (a round looks through one instance's queue), microseconds:\n\n"
    text += table(("policy", "decisions", "rounds", "decision p50", "p90", "round p50", "p90"), rows)
    figures = results.figures(_heldcell())
    if figures is not None:
        block = figures["bytes_per_block"]
        instance, papers = block * _PAPER_BLOCKS / 1024, _PAPER_BLOCK_BYTES * _PAPER_BLOCKS / 1024
        text += (
            f"\nIndex: {block:.0f} bytes a block, {instance:.0f} KiB for an instance of {_PAPER_BLOCKS:,} blocks "
            f"(paper: {_PAPER_BLOCK_BYTES} bytes, {papers:.0f} KiB), {instance * 32 / 1024:.1f} MiB for 32.\n"
        )
    return text


def _claims(results: Results, extent: Extent) -> Sequence[Claim]:
    decisions, rounds = [], []
    for policy in _OURS:
        kept = {size: results.figures(_decision_cell(size, policy)) for size in _SIZES}
        shown = ", ".join(f"{each['loaded_us'] / 1000:.2f} ({size})" for size, each in kept.items() if each is not None)
        if shown:
            decisions.append(f"`{policy}` {shown}")
        figures = results.figures(_run_cell(extent, policy))
        if figures is not None:
            middle, high = (number(figures[name], 2, 1e-3) for name in ("round_p50_us", "round_p90_us"))
            rounds.append(f"`{policy}` {middle} (P90 {high})")
    held = results.figures(_heldcell())
    block = "" if held is None else f"{held['bytes_per_block']:.0f}"
    return (
        Claim(
            "A.3.2, Fig. 13b",
            "routing takes 0.6 ms at any number of instances",
            f"ms: {'; '.join(decisions)}" if decisions else "",
        ),
        Claim(
            "A.3.2, Fig. 13b", "rebalancing takes 2.2 to 2.5 ms", f"ms a round: {'; '.join(rounds)}" if rounds else ""
        ),
        Claim(
            "A.3.2",
            "metadata are 16 bytes a block, 146 KB for an instance of 7B",
            block and f"{block} bytes a block of the index",
        ),
    )


SECTION: Final = Section(
    name="overhead", title="Overhead of the router (Figure 13b)", cells=_cells, page=_page, claims=_claims
)
