"""EAR's closed loop (Elastic Affinity Routing): an agent's next turn starts when the last turn ends.

Wall-clock amplification is the time until the last request has ended, divided by the trace's duration. An infinitely
fast system would need exactly that duration. Even an idle system needs longer, because of the longest sessions. So the
figure is also given for the first nine tenths of the requests. With KV moves, a session's KV moves to the new instance
together with the session.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Final

from bench.paper.agents import PULL_TOKENS_PER_S, WARMUP, closed_loop_figures
from bench.paper.cells import Cell, Figures
from bench.paper.charts import bars, finish, grid, legend, save
from bench.paper.claims import Claim
from bench.paper.results import Results
from bench.paper.section import Section
from bench.paper.settings import OURS, RIVALS, Extent, as_shipped
from bench.paper.tables import Spread, table

from dualmap_sim.experiment import Experiment, run_experiment
from dualmap_sim.presets import PRESETS
from dualmap_sim.workloads.catalog import Workload

_RATES: Final = (2.5, 3.5, 5.5)
"""Nominal requests per second: 1/2, 2/3, and slightly more than the capacity with one unlimited shared cache."""
_WITHOUT_MOVES: Final = ("all_cached", "round_robin", *RIVALS, "ear", *OURS)
_WITH_MOVES: Final = (*RIVALS, "ear", "dualmap")


def closed_loop(experiment: Experiment) -> Figures:
    """Run a closed loop; return its figures."""
    return closed_loop_figures(experiment, run_experiment(experiment))


def _cell(extent: Extent, rate: float, window: int, policy: str, *, moves: bool) -> Cell:
    experiment = as_shipped(
        Experiment(
            workload=Workload(name="agentic", requests=1200 if extent.quick else 4000, seed=window),
            engine=replace(PRESETS["agent"], pull_tokens_per_s=PULL_TOKENS_PER_S) if moves else PRESETS["agent"],
            policy=policy,
            requests_per_s=rate,
            warmup=WARMUP,
            kv_moves=moves,
        )
    )
    return Cell(
        section="sessions",
        name=f"{rate:g}/s window {window} {policy}{' with KV moves' if moves else ''}",
        policy=policy,
        measure=partial(closed_loop, experiment),
    )


_SETTINGS: Final = (*((policy, False) for policy in _WITHOUT_MOVES), *((policy, True) for policy in _WITH_MOVES))


def _cells(extent: Extent) -> Sequence[Cell]:
    return [
        _cell(extent, rate, window, policy, moves=moves)
        for window in extent.windows()
        for policy, moves in _SETTINGS
        for rate in _RATES
    ]


_COLUMNS: Final = (
    ("amplification", "amplification", 2, 1.0),
    ("amplification_90", "of nine tenths", 2, 1.0),
    ("turn_mean_s", "turn, mean s", 2, 1.0),
    ("ttft_p50_s", "TTFT p50 s", 2, 1.0),
    ("ttft_p90_s", "p90", 2, 1.0),
    ("hit_rate", "hit rate %", 1, 100.0),
    ("pulled_share", "pulled %", 1, 100.0),
    ("slo_attainment", "within SLO %", 1, 100.0),
    ("worker_median_p90_s", "instances' TTFT p90: median s", 2, 1.0),
    ("worker_max_p90_s", "worst s", 2, 1.0),
)


def _page(results: Results, extent: Extent, plots: Path) -> str:
    rows, drawn = [], {}
    for rate in _RATES:
        for policy, moves in _SETTINGS:
            cells = [_cell(extent, rate, window, policy, moves=moves) for window in extent.windows()]
            kept = [figures for cell in cells if (figures := results.figures(cell)) is not None]
            if not kept:
                continue
            drawn[rate, policy, moves] = [each["amplification"] for each in kept]
            shown = (Spread.of(each[name] for each in kept).show(digits, scale) for name, _, digits, scale in _COLUMNS)
            rows.append([f"{policy}{' with KV moves' if moves else ''}", f"{rate:g}", *shown])
    text = table(("policy", "nominal requests/s", *(title for _, title, *_ in _COLUMNS)), rows)
    figure, axes = grid(2, len(_RATES))
    for row, moves in zip(axes, (False, True), strict=True):
        policies = _WITH_MOVES if moves else _WITHOUT_MOVES
        for place, rate in zip(row, _RATES, strict=True):
            bars(place, policies, [drawn.get((rate, policy, moves), []) for policy in policies])
            finish(place, f"amplification at {rate:g}/s, {'with' if moves else 'no'} KV moves")
    legend(figure, _WITHOUT_MOVES)
    save(figure, plots / "sessions.png")
    return f"{text}\n![amplification](sessions.png)\n"


def _claims(results: Results, extent: Extent) -> Sequence[Claim]:
    _, high, beyond = _RATES

    def shown(name: str, rate: float, policies: Sequence[str], digits: int = 2, scale: float = 1.0) -> str:
        parts = []
        for policy in policies:
            cells = [_cell(extent, rate, window, policy, moves=False) for window in extent.windows()]
            kept = [figures for cell in cells if (figures := results.figures(cell)) is not None]
            if kept:
                parts.append(f"`{policy}` {fmean(each[name] for each in kept) * scale:.{digits}f}")
        return ", ".join(parts)

    policies = ("round_robin", "lmetric", "linear_score", "least_loaded", "cache_affinity", "ear", *OURS)
    amplified = {rate: shown("amplification", rate, ("all_cached", *policies)) for rate in (high, beyond)}
    return (
        Claim(
            "EAR 1, 5.4",
            "wall-clock amplification of 8 under load balancing, less under EAR (how much is left open)",
            "; ".join(f"at {rate:g}/s nominal {text}" for rate, text in amplified.items() if text),
        ),
        Claim(
            "EAR 2.2, 3.1, 3.3",
            "hit rate 54.1 to 56.9 % under load balancing, 77.2 % sticky, 79.4 % with affinity, of 80.3 % at best",
            f"%, at {high:g}/s: " + shown("hit_rate", high, policies, 1, 100),
        ),
        Claim(
            "EAR 3.3",
            "TTFT P90 of the median and the worst instance: 14.0 and 31.3 s balanced, 20.3 and 55.4 s sticky, "
            "10.3 and 37.7 s with affinity",
            f"at {beyond:g}/s, s: {shown('worker_median_p90_s', beyond, policies)}; "
            f"worst {shown('worker_max_p90_s', beyond, policies)}",
        ),
    )


SECTION: Final = Section(name="sessions", title="EAR's closed loop of agents", cells=_cells, page=_page, claims=_claims)
