"""Measures a run under a scaler or on a fixed fleet, and defines the cells of these runs.

Worker processes call these functions.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Final

from bench.autoscaling.settings import (
    ENOUGH,
    FIXED_MEAN,
    FIXED_PEAK,
    HASTY,
    MANIFEST,
    MEAN,
    SHAPES,
    SLO,
    SLO_HASTY,
    SLO_ROUTERS,
    SLO_S,
    START_S,
    TARGETS,
    WARMUP_S,
    Extent,
    phases,
    queue,
)
from bench.paper.cells import Cell
from bench.paper.cells import Figures as Kept
from bench.paper.settings import CONVERSATION

from dualmap.pools.pool import Engine, Model, Pool, Prefix, Routing
from dualmap_sim.arrivals import arrivals
from dualmap_sim.autoscaling.figures import attainment, figures, lag
from dualmap_sim.autoscaling.loop import Autoscaled, Run, run_autoscaled
from dualmap_sim.autoscaling.meters import OnQueue, OnSlo
from dualmap_sim.presets import PRESETS
from dualmap_sim.workloads.catalog import Workload
from dualmap_sim.workloads.pacing import Phase, paced
from dualmap_sim.workloads.trace import Trace

SECTION: Final = "autoscaling"
_ENGINE: Final = PRESETS["7b"]
_SEED_REQUESTS: Final = 4000
"""Number of requests between the starts of two seeds in the trace."""
_TOOL_AGENT_PER_S: Final = 7.0
"""At this rate the generated workload needs about as many instances as the trace at its recorded rate."""
_SERIES_S: Final = 30.0


def scaled(trace: Path, workload: str, shape: str, scaler: str, seed: int) -> Kept:
    """Run a shape under a scaler; return the figures, and the size of the fleet over time."""
    load = SHAPES[shape]
    config = _config(_load(trace, workload), load.first)
    if scaler in (SLO_HASTY, SLO_ROUTERS):
        config = replace(config, hpa=HASTY) if scaler == SLO_HASTY else replace(config, routers=4)
    elif scaler in (FIXED_PEAK, FIXED_MEAN):
        config = replace(config, scaler=None, first=ENOUGH[load.highest] if scaler == FIXED_PEAK else MEAN)
    elif scaler != SLO:
        (target,) = (each for each in TARGETS if queue(each) == scaler)
        config = replace(config, scaler=OnQueue(requests=target))
    run = _run(trace, workload, config, load.phases, seed)
    kept = _figures(run)
    if load.rises_s is not None:
        found = lag(run.syncs, since_s=load.rises_s, enough=ENOUGH[load.highest])
        kept |= {"asked_after_s": found.asked_s, "serving_after_s": found.serving_s}
    # The chart shows the run with seed 0 of each shape and scaler.
    return kept | (_series(run) if seed == 0 else {})


def sized(trace: Path, workload: str, rate: float, instances: int, seed: int) -> Kept:
    """Run half an hour at a rate on a fixed fleet; return the figures."""
    config = replace(_config(_load(trace, workload), instances), scaler=None)
    return _figures(_run(trace, workload, config, phases((30, rate)), seed))


def _config(trace: Trace, first: int) -> Autoscaled:
    pool = Pool(
        namespace="bench",
        name="qwen",
        model=Model(name="qwen"),
        engine=Engine(
            prefill_tokens_per_second=_ENGINE.prefill.tokens_per_s,
            cache_tokens=_ENGINE.cache_tokens,
            kv_tokens=_ENGINE.kv_memory_tokens,
        ),
        routing=Routing(prefix=Prefix(block_tokens=trace.block_tokens)),
    )
    return Autoscaled(pool=pool, engine=_ENGINE, first=first, scaler=OnSlo(), hpa=MANIFEST, start_s=START_S)


def _run(trace: Path, workload: str, config: Autoscaled, pace: Sequence[Phase], seed: int) -> Run:
    load = paced(_load(trace, workload), pace, start=seed * _SEED_REQUESTS)
    replayed = arrivals(load, router_block_tokens=load.block_tokens, engine_block_tokens=_ENGINE.block_tokens)
    return run_autoscaled(replace(config, lasts_s=sum(phase.seconds for phase in pace)), replayed)


@lru_cache(maxsize=1)
def _load(trace: Path, workload: str) -> Trace:
    if workload == CONVERSATION:
        loaded = Workload(trace=trace, requests=1_000_000).load()
    else:
        loaded = Workload(name=workload, requests=3 * _SEED_REQUESTS).load().at_rate(_TOOL_AGENT_PER_S)
    return loaded.capped(_ENGINE.input_tokens_max).without_sessions()


def _figures(run: Run) -> dict[str, Any]:
    found = figures(run, slo_ttft_s=SLO_S, warmup_s=WARMUP_S)
    return {
        "slo_attainment": found.summary.slo_attainment,
        "worst_minute": found.worst_minute,
        "refused": found.summary.refused,
        "failed": found.summary.failed,
        "ttft_p99_s": found.summary.ttft_p99_s,
        "hit_rate": found.summary.hit_rate,
        "instance_hours": found.instance_hours,
        "replicas_mean": found.replicas_mean,
        "replicas_max": found.replicas_max,
        "changes": found.changes,
        "turns": found.turns,
        "cut": found.cut,
    }


def _series(run: Run) -> dict[str, Any]:
    syncs = [sync for sync in run.syncs if sync.at_s % _SERIES_S == 0]
    met = attainment(run.records, slo_ttft_s=SLO_S, every_s=60.0)
    return {
        "series": {
            "at_s": [sync.at_s for sync in syncs],
            "asked": [sync.requested for sync in syncs],
            "serving": [sync.serving for sync in syncs],
            "attainment": [[at_s, share] for at_s, share in met],
        }
    }


def cell(extent: Extent, shape: str, scaler: str, seed: int) -> Cell:
    """Return the cell of a shape under a scaler."""
    return Cell(
        section=SECTION,
        name=f"{extent.workload} {shape}: {scaler}, seed {seed}",
        policy=scaler,
        measure=partial(scaled, extent.trace, extent.workload, shape, scaler, seed),
    )


def size_cell(extent: Extent, rate: float, instances: int, seed: int) -> Cell:
    """Return the cell of a fixed fleet at a rate."""
    return Cell(
        section=SECTION,
        name=f"{extent.workload} at {rate:g}: {instances} instances, seed {seed}",
        policy="fixed",
        measure=partial(sized, extent.trace, extent.workload, rate, instances, seed),
    )


def cells(extent: Extent) -> list[Cell]:
    """Return all cells to measure, seed by seed."""
    every: list[Cell] = []
    for seed in extent.seeds:
        every += [cell(extent, shape, each, seed) for shape in extent.shapes for each in extent.scalers(shape, seed)]
        every += [size_cell(extent, rate, size, seed) for rate, size in extent.sizes(seed)]
    return [*every, *(cell(extent, shape, SLO_ROUTERS, seed) for shape, seed in extent.routers)]
