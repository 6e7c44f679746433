"""The time per output token (TPOT), with whole prompts and with vLLM's steps. This is a part of the section decode."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from bench.paper.cells import Cell, Figures
from bench.paper.measures import summary_figures, tpot_figures
from bench.paper.results import Results
from bench.paper.settings import CONVERSATION, OURS, TITLES, TOOL_AGENT, Extent
from bench.paper.tables import number, table

from dualmap_sim.experiment import Experiment, run_experiment

_MODEL: Final = "7b"
_RATES: Final = {CONVERSATION: 2.75, TOOL_AGENT: 7.0}
_POLICIES: Final = (*OURS, "min_ttft", "least_loaded", "llmd_default")
_CHUNK_TOKENS: Final = 2048
"""A step of vLLM's mode, in which decodes continue beside the pieces of a prompt."""
_PREFILLS: Final = {None: "whole prompts", _CHUNK_TOKENS: f"steps of {_CHUNK_TOKENS}"}

_COLUMNS: Final = (
    ("slo_attainment", "within SLO %", 1, 100.0),
    ("ttft_p90_s", "TTFT p90 s", 2, 1.0),
    ("e2e_p50_s", "E2E p50 s", 1, 1.0),
    ("e2e_p90_s", "p90", 1, 1.0),
    ("tpot_mean_s", "TPOT mean ms", 0, 1000.0),
    ("tpot_p50_s", "p50", 0, 1000.0),
    ("tpot_p90_s", "p90", 0, 1000.0),
    ("tpot_p99_s", "p99", 0, 1000.0),
)


def tpot(experiment: Experiment) -> Figures:
    """Run an experiment; return its summary with the time per output token."""
    outcome = run_experiment(experiment)
    return {**summary_figures(outcome.summary), **tpot_figures(outcome.records[experiment.warmup :])}


def _cell(extent: Extent, workload: str, chunk_tokens: int | None, policy: str) -> Cell:
    experiment = extent.experiment(workload, _MODEL, 0, policy, _RATES[workload])
    return Cell(
        section="decode",
        name=f"TPOT {workload} {'whole' if chunk_tokens is None else f'chunks of {chunk_tokens}'} {policy}",
        policy=policy,
        measure=partial(tpot, replace(experiment, engine=replace(experiment.engine, chunk_tokens=chunk_tokens))),
    )


def tpot_cells(extent: Extent) -> Sequence[Cell]:
    """Return the cells of the time per output token."""
    return [
        _cell(extent, workload, chunk_tokens, policy)
        for policy in _POLICIES
        for workload in extent.workloads
        for chunk_tokens in _PREFILLS
    ]


def tpot_runs(results: Results, extent: Extent) -> dict[str, dict[str, Figures]]:
    """Return the figures of all measured runs, by the run's title and the policy."""
    return {
        f"{TITLES[workload]} at {_RATES[workload]:g}/s, {prefill}": results.measured(
            {policy: _cell(extent, workload, chunk_tokens, policy) for policy in _POLICIES}
        )
        for workload in extent.workloads
        for chunk_tokens, prefill in _PREFILLS.items()
    }


def tpot_table(results: Results, extent: Extent) -> str:
    """Return the part of the section's page with the time per output token."""
    rows = [
        [run, policy, *(number(figures[name], digits, scale) for name, _, digits, scale in _COLUMNS)]
        for run, found in tpot_runs(results, extent).items()
        for policy, figures in found.items()
    ]
    heads = ("workload, prefill", "policy", *(title for _, title, *_ in _COLUMNS))
    return f"## Time per output token\n\n{table(heads, rows)}\n"
