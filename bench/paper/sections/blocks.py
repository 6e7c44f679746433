"""The router's block length (``prefix.blockTokens``): 16 to 512 tokens (DualMap paper, A.1.1 and A.3.2).

Keys begin with two blocks, and have at most 64. So the block length changes the keys, the precision of predictions, the
size of the index, and the time of a decision. The engines keep blocks of 512 tokens, as the traces have them, so that
the reusable tokens are equal. In extra runs, the longest key has always the same tokens, or the engines have the
router's blocks.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Final
from unittest.mock import patch

from bench.paper.cells import Cell, Figures
from bench.paper.charts import draw_lines, finish, grid, legend, save
from bench.paper.claims import Claim
from bench.paper.measures import goodput_figures, summary_figures, timed
from bench.paper.results import Results
from bench.paper.section import Section
from bench.paper.settings import CONVERSATION, OURS, TITLES, TOOL_AGENT, Extent
from bench.paper.tables import Spread, number, table

from dualmap.pools.pool import Prefix, Routing
from dualmap.router import PoolRouter
from dualmap_sim.experiment import Experiment, run_experiment

_MODEL: Final = "7b"
_LENGTHS: Final = (16, 32, 64, 128, 256, 512)
_KEY_TOKENS: Final = 8192
"""Length of the longest key in the extra runs: 64 blocks of 128 tokens."""
_AS_IT_IS: Final = "as it is"
_LONG_KEYS: Final = "keys of 8192"
_SAME_BLOCKS: Final = "engine's blocks too"
_VARIANTS: Final[Mapping[str, tuple[int, ...]]] = MappingProxyType(
    {_AS_IT_IS: _LENGTHS, _LONG_KEYS: (16, 32, 64), _SAME_BLOCKS: (16, 128)}
)
"""The block lengths of each variant."""
_MAX_BLOCKS: Final = Prefix().max_blocks
_RATES: Final = {CONVERSATION: 3.0, TOOL_AGENT: 7.0}


def run_of_length(experiment: Experiment) -> Figures:
    """Run an experiment; return its summary, the time of a decision, and how far predictions of the cache are off."""
    times_s: list[float] = []
    with patch.object(PoolRouter, "on_request", timed(PoolRouter.on_request, times_s, time.process_time)):
        outcome = run_experiment(experiment)
    served = [each for each in outcome.records[experiment.warmup :] if each.predicted_tokens is not None]
    return {
        **summary_figures(outcome.summary),
        "decision_us": fmean(times_s) * 1e6,
        "prediction_error_tokens": fmean(abs((each.predicted_tokens or 0) - each.cached_tokens) for each in served),
        "wrong_share": fmean((each.predicted_tokens or 0) != each.cached_tokens for each in served),
    }


def _run_cell(extent: Extent, workload: str, window: int, variant: str, length: int, policy: str) -> Cell:
    experiment = extent.experiment(workload, _MODEL, window, policy, _RATES[workload])
    if variant == _LONG_KEYS:
        experiment = replace(experiment, routing=Routing(prefix=Prefix(max_blocks=_KEY_TOKENS // length)))
    elif variant == _SAME_BLOCKS:
        experiment = replace(experiment, engine=replace(experiment.engine, block_tokens=length))
    return Cell(
        section="blocks",
        name=f"{workload} window {window} {length} tokens {variant} {policy}",
        policy=policy,
        measure=partial(run_of_length, replace(experiment, block_tokens=length)),
    )


def _goodput_cell(extent: Extent, workload: str, length: int, policy: str) -> Cell:
    experiment = extent.experiment(workload, _MODEL, 0, policy)
    return Cell(
        section="blocks",
        name=f"goodput {workload} {length} tokens {policy}",
        policy=policy,
        measure=partial(goodput_figures, replace(experiment, block_tokens=length)),
    )


def _lengths(extent: Extent) -> tuple[int, ...]:
    return (_LENGTHS[0], _LENGTHS[3], _LENGTHS[-1]) if extent.quick else _LENGTHS


def _rows(extent: Extent) -> list[tuple[str, int]]:
    """Return the variants of the runs, each with a block length."""
    lengths = _lengths(extent)
    return [(variant, length) for variant, of in _VARIANTS.items() for length in of if length in lengths]


def _cells(extent: Extent) -> Sequence[Cell]:
    runs = [
        _run_cell(extent, workload, window, variant, length, policy)
        for policy in OURS
        for workload in extent.workloads
        for window in extent.windows()
        for variant, length in _rows(extent)
    ]
    goodputs = [
        _goodput_cell(extent, workload, length, policy)
        for policy in OURS
        for workload in extent.workloads
        for length in _lengths(extent)
    ]
    return [*runs, *goodputs]


_COLUMNS: Final = (
    ("slo_attainment", "within SLO %", 1, 100.0),
    ("ttft_p50_s", "TTFT p50 s", 2, 1.0),
    ("ttft_p90_s", "p90", 2, 1.0),
    ("hit_rate", "hit rate %", 1, 100.0),
    ("prediction_error_tokens", "prediction's error, mean tokens", 0, 1.0),
    ("wrong_share", "predictions not exact %", 1, 100.0),
    ("decision_us", "decision, mean microseconds", 0, 1.0),
)


def _spread(results: Results, extent: Extent, workload: str, row: tuple[str, int], policy: str, name: str) -> Spread:
    kept = (results.figures(_run_cell(extent, workload, window, *row, policy)) for window in extent.windows())
    return Spread.of(figures[name] for figures in kept if figures is not None)


def _goodput(results: Results, extent: Extent, workload: str, length: int, policy: str) -> float | None:
    figures = results.figures(_goodput_cell(extent, workload, length, policy))
    return None if figures is None else figures["goodput_qps"]


def _page(results: Results, extent: Extent, plots: Path) -> str:
    parts = []
    for workload in extent.workloads:
        rows = []
        for policy in OURS:
            for variant, length in _rows(extent):
                shown = (
                    _spread(results, extent, workload, (variant, length), policy, name).show(digits, scale)
                    for name, _, digits, scale in _COLUMNS
                )
                goodput = _goodput(results, extent, workload, length, policy) if variant == _AS_IT_IS else None
                longest = _KEY_TOKENS if variant == _LONG_KEYS else length * _MAX_BLOCKS
                rows.append([policy, f"{length}", variant, f"{longest:,}", number(goodput), *shown])
        parts.append(f"## {TITLES[workload]}: goodput, and a run at {_RATES[workload]:g}/s\n\n")
        heads = (
            "policy",
            "blockTokens",
            "variant",
            "longest key, tokens",
            "goodput, requests/s",
            *(title for _, title, *_ in _COLUMNS),
        )
        parts.append(table(heads, rows) + "\n")
    figure, axes = grid(1, 2)
    for place, workload in zip(axes[0], extent.workloads, strict=False):
        lines = {
            policy: [(length, _goodput(results, extent, workload, length, policy)) for length in _lengths(extent)]
            for policy in OURS
        }
        draw_lines(place, OURS, lines)
        place.set_xscale("log", base=2)
        place.set_ylim(bottom=0)
        finish(place, f"{TITLES[workload]}: goodput, requests/s", across="blockTokens")
    for place in axes[0][len(extent.workloads) :]:
        place.set_visible(False)
    legend(figure, OURS)
    save(figure, plots / "blocks.png")
    return "".join(parts) + "![goodput over the block length](blocks.png)\n"


def _excerpt(results: Results, extent: Extent) -> str:
    """Return the goodput by block length."""
    lengths = _lengths(extent)
    rows = [
        [
            f"{TITLES[workload]}, `{policy}`",
            *(number(_goodput(results, extent, workload, length, policy)) for length in lengths),
        ]
        for workload in extent.workloads
        for policy in OURS
    ]
    return table(("goodput/s with `blockTokens`", *(f"{length}" for length in lengths)), rows)


def _claims(results: Results, extent: Extent) -> Sequence[Claim]:
    parts = []
    for workload in extent.workloads:
        for policy in OURS:
            rates = [number(_goodput(results, extent, workload, length, policy)) for length in _lengths(extent)]
            if any(each != "-" for each in rates):
                parts.append(f"{TITLES[workload]} `{policy}` {', '.join(rates)}/s")
    lengths = ", ".join(f"{each}" for each in _lengths(extent))
    return (
        Claim(
            "A.1.1, A.3.2",
            "keys of blocks of 512 tokens, an index of blocks of 128 tokens (no figures for other lengths)",
            f"goodput with blocks of {lengths} tokens: {'; '.join(parts)}" if parts else "",
        ),
    )


SECTION: Final = Section(
    name="blocks",
    title="Block lengths of 16 to 512 tokens",
    cells=_cells,
    page=_page,
    claims=_claims,
    excerpts={"blocks": _excerpt},
)
