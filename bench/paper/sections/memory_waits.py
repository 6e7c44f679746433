"""The wait for KV memory in T_q: at members with little memory, not at all, and at all members.

Some of 8 engines have less memory than the others. All report it. The router counts the wait only at members that have
much less than the others (docs/adr/0011-deferring-and-memory.md). This is a part of the section decode.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from typing import Final
from unittest.mock import patch

from bench.paper.cells import Cell, Figures
from bench.paper.measures import goodput_figures, run_figures
from bench.paper.results import Results
from bench.paper.sections import goodput
from bench.paper.settings import CONVERSATION, DEFAULT_POLICY, TITLES, TOOL_AGENT, Extent
from bench.paper.tables import number, table

from dualmap.fleet import memory_waits
from dualmap_sim.experiment import Experiment, member_ids

_MODEL: Final = "7b"
_GOODPUT_MODELS: Final = ("7b", "14b")
_RATES: Final = {CONVERSATION: 2.5, TOOL_AGENT: 6.0}
_SMALL: Final = ((1, 25_000), (2, 25_000), (1, 47_500), (4, 47_500), (8, 47_500))
"""The number of engines with less memory, and their memory in tokens."""
_USUAL: Final = "as shipped"
_EVERY: Final = "every wait counts"
_PARTS: Final = {_USUAL: memory_waits._SMALL_PART, "no wait counts": 0.0, _EVERY: inf}
"""The part of the pool's median memory up to which a member's waits count."""


def counted(measure: Callable[[Experiment], Figures], small_part: float, experiment: Experiment) -> Figures:
    """Return the figures of an experiment in which waits count up to a part of the median memory."""
    with patch.object(memory_waits, "_SMALL_PART", small_part):
        return measure(experiment)


def _cell(name: str, count: str, measure: Callable[[Experiment], Figures], experiment: Experiment) -> Cell:
    return Cell(
        section="decode",
        name=f"memory waits {name} {DEFAULT_POLICY}, {count}",
        policy=DEFAULT_POLICY,
        measure=partial(counted, measure, _PARTS[count], experiment),
    )


def _run_cells(extent: Extent) -> dict[str, list[Cell]]:
    """Return the cells of each row of the first table."""
    rows = {}
    for workload in extent.workloads:
        usual = extent.experiment(workload, _MODEL, 0, DEFAULT_POLICY, _RATES[workload])
        for engines, tokens in _SMALL:
            little = replace(usual.engine, kv_memory_tokens=tokens)
            experiment = replace(usual, engines=tuple((each, little) for each in member_ids(engines)))
            title = f"{TITLES[workload]} at {_RATES[workload]:g}/s, {engines} of 8 engines with {tokens:,} tokens"
            name = f"{workload} {engines} with {tokens}"
            rows[title] = [_cell(name, count, run_figures, experiment) for count in _PARTS]
    return rows


def _goodput_cells(extent: Extent) -> dict[str, list[Cell]]:
    """Return the cells of each row of the second table. With equal memories, no wait counts as shipped."""
    rows = {}
    for workload in extent.workloads:
        for model in _GOODPUT_MODELS:
            experiment = extent.experiment(workload, model, 0, DEFAULT_POLICY)
            rows[f"{TITLES[workload]} {model}"] = [
                goodput.TRACES.cell(extent, workload, model, 0, DEFAULT_POLICY),
                _cell(f"{workload} {model}", _EVERY, goodput_figures, experiment),
            ]
    return rows


def wait_cells(extent: Extent) -> Sequence[Cell]:
    """Return the cells of both tables."""
    return [cell for cells in (*_run_cells(extent).values(), *_goodput_cells(extent).values()) for cell in cells]


def wait_table(results: Results, extent: Extent) -> str:
    """Return the part of the section's page with the waits for memory."""
    within = [[title, *_shown(results, cells, "slo_attainment", 1, 100)] for title, cells in _run_cells(extent).items()]
    rates = [[title, *_shown(results, cells, "goodput_qps", 2)] for title, cells in _goodput_cells(extent).items()]
    return (
        "## The wait for memory in T_q\n\n"
        f"{table((f'`{DEFAULT_POLICY}`, within SLO %', *_PARTS), within)}\n"
        f"{table((f'`{DEFAULT_POLICY}`, equal memories: goodput/s', _USUAL, _EVERY), rates)}\n"
    )


def _shown(results: Results, cells: Sequence[Cell], name: str, digits: int, scale: float = 1.0) -> list[str]:
    found = (results.figures(cell) for cell in cells)
    return [number(None if each is None else each[name], digits, scale) for each in found]
