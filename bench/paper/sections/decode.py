"""The decode bottleneck (DualMap paper, A.7), and the time per output token (TPOT).

An engine with exhausted memory starts no prefill until a decode ends. The paper detects this if no prefill ends for a
threshold T, and adds the interval to the predicted TTFT. The engines here get less KV memory: all of them, or one of
eight. By default, engines report their memory, and the router sends a prompt when it fits. In the paper, the router
does not know the memory. So in most runs with one small instance, and in some others, the engines report nothing.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from statistics import fmean
from typing import Final

from bench.paper.cells import Cell, Figures
from bench.paper.charts import draw_lines, finish, grid, legend, save
from bench.paper.claims import Claim
from bench.paper.measures import summary_figures
from bench.paper.results import Results
from bench.paper.section import Section
from bench.paper.sections.memory_waits import wait_cells, wait_table
from bench.paper.sections.tpot import tpot_cells, tpot_table
from bench.paper.settings import CONVERSATION, OURS, TITLES, TOOL_AGENT, Extent
from bench.paper.tables import Spread, number, table

from dualmap.pools.pool import Rebalance, Routing
from dualmap_sim.experiment import Experiment, run_experiment
from dualmap_sim.presets import PRESETS, EngineConfig
from dualmap_sim.records import Record

_MODEL: Final = "7b"
_FULL: Final = PRESETS[_MODEL].kv_memory_tokens
_MEMORIES: Final = (_FULL, _FULL // 2, _FULL // 4)
_MEMORY_RATES: Final = {CONVERSATION: 2.0, TOOL_AGENT: 5.0}
"""Rates at which every policy meets the SLO with the full memory."""
_MEMORY_POLICIES: Final = (
    *((policy, True) for policy in ("dualmap_no_rebalance", *OURS, "min_ttft", "llmd_default")),
    *((policy, False) for policy in OURS),
)
"""Each policy with whether the engines report their memory."""
_UNREPORTED: Final = ", engines report nothing"

_SMALL: Final = 25_000
"""The memory of one instance of eight: one long prompt."""
_STALL_RATES: Final = {CONVERSATION: 2.5, TOOL_AGENT: 6.0}
_STALL_POLICIES: Final = (*OURS, "min_ttft", "llmd_default")
"""T is a setting of our policies, so the others have one run, in which the engines report their memory."""
_NEVER_S: Final = 600.0
_THRESHOLDS_S: Final = (0.5, 1.0, 3.0, 10.0, _NEVER_S)
_PAPER_S: Final = 3.0


def bottlenecked(experiment: Experiment, small: str | None = None) -> Figures:
    """Run an experiment; return its summary, and how long requests waited for memory at the head of an engine's queue.

    ``small`` is the member with less memory; the result then has its shares of the requests and of the computed prompt
    tokens, and the attainment of its requests.
    """
    outcome = run_experiment(experiment)
    counted = outcome.records[experiment.warmup :]
    waits_s = memory_waits_s(counted, experiment.engine)
    figures: Figures = {
        **summary_figures(outcome.summary),
        "moved_share": outcome.summary.rules.get("rebalanced", 0) / outcome.summary.requests,
        "waited_1_s_share": fmean(each > 1.0 for each in waits_s),
        "waited_3_s_share": fmean(each > _PAPER_S for each in waits_s),
        "waited_max_s": max(waits_s),
    }
    if small is None:
        return figures
    endpoint = f"10.0.0.{small.rpartition('-')[2]}:8000"
    there = [each for each in counted if each.endpoint == endpoint]
    tokens, tokens_there = (
        sum(each.arrival.work.prompt_tokens - each.cached_tokens for each in records if each.first_token_s is not None)
        for records in (counted, there)
    )
    in_time = [each.ttft_s is not None and each.ttft_s <= experiment.slo_ttft_s for each in there]
    return {
        **figures,
        "there_share": len(there) / len(counted),
        "there_tokens_share": tokens_there / tokens,
        "there_attainment": fmean(in_time) if there else None,
    }


def memory_waits_s(records: Sequence[Record], engine: EngineConfig) -> list[float]:
    """Return how long each served request waited for memory, as the first of its engine's queue.

    An engine of whole prefills computes one prompt after the other. So the wait is the time between the request's
    arrival at the engine or the end of the previous prefill, whichever is later, and the begin of its own prefill. A
    decode step in progress is a part of the wait.
    """
    served: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for record in records:
        if record.first_token_s is None or record.dispatched_s is None or record.endpoint is None:
            continue
        prefill_s = engine.prefill_s(
            new_tokens=record.arrival.work.prompt_tokens - record.cached_tokens,
            cached_tokens=record.cached_tokens,
            pulled_tokens=0,
        )
        served[record.endpoint].append((record.first_token_s, prefill_s, record.dispatched_s))
    waits_s = []
    for requests in served.values():
        previous_s = -inf
        for first_token_s, prefill_s, dispatched_s in sorted(requests):
            waits_s.append(max(0.0, first_token_s - prefill_s - max(previous_s, dispatched_s)))
            previous_s = first_token_s
    return waits_s


def _unreported(experiment: Experiment) -> Experiment:
    """Return an experiment whose routers know nothing of the engines' memory."""
    return replace(experiment, discovery=False, kv_tokens_known=False)


def _memory_cell(extent: Extent, workload: str, memory: int, policy: str, *, reported: bool) -> Cell:
    experiment = extent.experiment(workload, _MODEL, 0, policy, _MEMORY_RATES[workload])
    experiment = replace(experiment, engine=replace(experiment.engine, kv_memory_tokens=memory))
    return Cell(
        section="decode",
        name=f"memory {workload} {memory} {policy}{'' if reported else _UNREPORTED}",
        policy=policy,
        measure=partial(bottlenecked, experiment if reported else _unreported(experiment)),
    )


def _stall_cell(
    extent: Extent, workload: str, window: int, threshold_s: float, policy: str, *, reported: bool = False
) -> Cell:
    experiment = extent.experiment(workload, _MODEL, window, policy, _STALL_RATES[workload])
    experiment = replace(
        experiment if reported else _unreported(experiment),
        engines=(("qwen-0", replace(experiment.engine, kv_memory_tokens=_SMALL)),),
        routing=Routing(rebalance=Rebalance(decode_stall_s=threshold_s)),
    )
    return Cell(
        section="decode",
        name=f"stall {workload} window {window} T {threshold_s:g} {policy}{'' if reported else _UNREPORTED}",
        policy=policy,
        measure=partial(bottlenecked, experiment, "qwen-0"),
    )


def _thresholds(extent: Extent) -> tuple[float, ...]:
    return (_PAPER_S, _NEVER_S) if extent.quick else _THRESHOLDS_S


def _stall_rows(extent: Extent, policy: str) -> list[tuple[float, bool]]:
    """Return the thresholds of a policy's runs with one small instance, each with whether engines report memory."""
    unreported = _thresholds(extent) if policy in OURS else ()
    return [*((threshold_s, False) for threshold_s in unreported), (_PAPER_S, True)]


def _cells(extent: Extent) -> Sequence[Cell]:
    memory = [
        _memory_cell(extent, workload, memory, policy, reported=reported)
        for workload in extent.workloads
        for memory in _MEMORIES
        for policy, reported in _MEMORY_POLICIES
    ]
    stall = [
        _stall_cell(extent, workload, window, threshold_s, policy, reported=reported)
        for policy in _STALL_POLICIES
        for workload in extent.workloads
        for window in extent.windows()
        for threshold_s, reported in _stall_rows(extent, policy)
    ]
    return [*memory, *stall, *tpot_cells(extent), *wait_cells(extent)]


_MEMORY_COLUMNS: Final = (
    ("slo_attainment", "within SLO %", 1, 100.0),
    ("ttft_p50_s", "TTFT p50 s", 2, 1.0),
    ("ttft_p90_s", "p90", 2, 1.0),
    ("ttft_p99_s", "p99", 2, 1.0),
    ("hit_rate", "hit rate %", 1, 100.0),
    ("waited_1_s_share", "waited over 1 s for memory %", 1, 100.0),
    ("waited_max_s", "longest s", 1, 1.0),
)
_STALL_COLUMNS: Final = (
    ("slo_attainment", "within SLO %", 1, 100.0),
    ("ttft_p90_s", "TTFT p90 s", 2, 1.0),
    ("ttft_p99_s", "p99", 2, 1.0),
    ("hit_rate", "hit rate %", 1, 100.0),
    ("moved_share", "moved by rebalancing %", 2, 100.0),
    ("waited_3_s_share", "waited over 3 s for memory %", 2, 100.0),
    ("there_share", "requests at the small instance %", 1, 100.0),
    ("there_tokens_share", "computed tokens there %", 1, 100.0),
    ("there_attainment", "within SLO there %", 1, 100.0),
)


def _stalls(
    results: Results, extent: Extent, workload: str, threshold_s: float, policy: str, *, reported: bool = False
) -> list[Figures]:
    cells = [
        _stall_cell(extent, workload, window, threshold_s, policy, reported=reported) for window in extent.windows()
    ]
    return [figures for cell in cells if (figures := results.figures(cell)) is not None]


def _threshold(threshold_s: float) -> str:
    return "off" if threshold_s == _NEVER_S else f"{threshold_s:g}"


def memory_runs(results: Results, extent: Extent) -> dict[str, dict[str, Figures]]:
    """Return the figures of the runs in which all engines report the same memory, by title and policy."""
    return {
        f"{TITLES[workload]} at {_MEMORY_RATES[workload]:g}/s, {memory // 1000}k tokens of memory": results.measured(
            {
                policy: _memory_cell(extent, workload, memory, policy, reported=True)
                for policy, reported in _MEMORY_POLICIES
                if reported
            },
        )
        for workload in extent.workloads
        for memory in _MEMORIES
    }


def stall_runs(results: Results, extent: Extent) -> dict[str, dict[str, Figures]]:
    """Return the figures of the first window with one small instance that reports its memory, by title and policy."""
    return {
        f"{TITLES[workload]} at {_STALL_RATES[workload]:g}/s": results.measured(
            {policy: _stall_cell(extent, workload, 0, _PAPER_S, policy, reported=True) for policy in _STALL_POLICIES},
        )
        for workload in extent.workloads
    }


def _page(results: Results, extent: Extent, plots: Path) -> str:
    parts = ["![attainment and TTFT over the threshold](decode.png)\n\n"]
    for workload in extent.workloads:
        rows = []
        for memory in _MEMORIES:
            for policy, reported in _MEMORY_POLICIES:
                figures = results.figures(_memory_cell(extent, workload, memory, policy, reported=reported))
                if figures is not None:
                    name = f"{policy}{'' if reported else _UNREPORTED}"
                    shown = (number(figures[each], digits, scale) for each, _, digits, scale in _MEMORY_COLUMNS)
                    rows.append([f"{memory:,}", name, *shown])
        parts.append(f"## {TITLES[workload]} at {_MEMORY_RATES[workload]:g}/s: KV memory of all instances\n\n")
        heads = ("KV memory, tokens", "policy", *(title for _, title, *_ in _MEMORY_COLUMNS))
        parts.append(table(heads, rows) + "\n")
    for workload in extent.workloads:
        rows = []
        for policy in _STALL_POLICIES:
            for threshold_s, reported in _stall_rows(extent, policy):
                kept = _stalls(results, extent, workload, threshold_s, policy, reported=reported)
                if kept:
                    shown = (
                        Spread.of(each[name] for each in kept).show(digits, scale)
                        for name, _, digits, scale in _STALL_COLUMNS
                    )
                    threshold = _threshold(threshold_s) if policy in OURS else "-"
                    rows.append([policy, f"{threshold}{', memory reported' if reported else ''}", *shown])
        parts.append(
            f"## {TITLES[workload]} at {_STALL_RATES[workload]:g}/s: one of 8 instances with {_SMALL:,} KV tokens"
            f"{_UNREPORTED} unless stated\n\n"
        )
        parts.append(table(("policy", "T s", *(title for _, title, *_ in _STALL_COLUMNS)), rows) + "\n")
    parts += [tpot_table(results, extent), wait_table(results, extent)]
    _draw(results, extent, plots)
    return "".join(parts)


def _draw(results: Results, extent: Extent, plots: Path) -> None:
    figure, axes = grid(len(extent.workloads), 2)
    for row, workload in zip(axes, extent.workloads, strict=True):
        for place, name, scale, title in (
            (row[0], "slo_attainment", 100.0, "within the SLO, %"),
            (row[1], "ttft_p99_s", 1.0, "TTFT p99, s"),
        ):
            lines = {
                policy: [
                    (threshold_s, None if mean is None else mean * scale)
                    for threshold_s in _thresholds(extent)
                    for mean in [
                        Spread.of(each[name] for each in _stalls(results, extent, workload, threshold_s, policy)).mean
                    ]
                ]
                for policy in OURS
            }
            draw_lines(place, OURS, lines)
            place.set_xscale("log")
            finish(place, f"{TITLES[workload]}: {title}", across=f"threshold T, s ({_NEVER_S:g}: off)")
    legend(figure, OURS)
    save(figure, plots / "decode.png")


def _excerpt(results: Results, extent: Extent) -> str:
    """Return the attainment by KV memory and policy."""
    rows = []
    for workload in extent.workloads:
        for memory in _MEMORIES:
            kept = (
                results.figures(_memory_cell(extent, workload, memory, policy, reported=reported))
                for policy, reported in _MEMORY_POLICIES
            )
            shares = (number(None if each is None else each["slo_attainment"], 1, 100) for each in kept)
            rows.append([f"{TITLES[workload]} at {_MEMORY_RATES[workload]:g}/s", f"{memory:,}", *shares])
    names = (f"{policy}{'' if reported else _UNREPORTED}" for policy, reported in _MEMORY_POLICIES)
    return table(("within the SLO, %", "KV memory, tokens", *names), rows)


def _claims(results: Results, extent: Extent) -> Sequence[Claim]:
    return (
        Claim(
            "A.7.3",
            "high SLO attainment although the engines' memory is exhausted",
            "; ".join(part for workload in extent.workloads if (part := _memory_claim(results, extent, workload))),
        ),
        Claim(
            "A.7.3",
            "T = 3 s works well: a larger T detects late, a smaller T costs cache affinity",
            "; ".join(part for workload in extent.workloads if (part := _stall_claim(results, extent, workload))),
        ),
    )


def _memory_claim(results: Results, extent: Extent, workload: str) -> str:
    parts = []
    for memory in _MEMORIES:
        shown = []
        for policy, reported in _MEMORY_POLICIES:
            figures = results.figures(_memory_cell(extent, workload, memory, policy, reported=reported))
            if figures is not None and policy in (*OURS, "min_ttft"):
                shown.append(f"`{policy}`{'' if reported else _UNREPORTED} {number(figures['slo_attainment'], 1, 100)}")
        if shown:
            parts.append(f"{memory // 1000}k tokens of memory {', '.join(shown)}")
    return f"{TITLES[workload]} at {_MEMORY_RATES[workload]:g}/s, %: {'; '.join(parts)}" if parts else ""


def _stall_claim(results: Results, extent: Extent, workload: str) -> str:
    parts = []
    for policy in OURS:
        shown = []
        for threshold_s in _thresholds(extent):
            kept = _stalls(results, extent, workload, threshold_s, policy)
            attained, p99_s, hits = (
                Spread.of(each[name] for each in kept).mean for name in ("slo_attainment", "ttft_p99_s", "hit_rate")
            )
            if kept:
                shown.append(
                    f"{_threshold(threshold_s)}: {number(attained, 1, 100)} %, {number(p99_s, 1)} s, "
                    f"{number(hits, 1, 100)} %"
                )
        if shown:
            parts.append(f"`{policy}` {'; '.join(shown)}")
    return f"{TITLES[workload]}, one small instance, T: attainment, TTFT P99, hits. {'. '.join(parts)}" if parts else ""


SECTION: Final = Section(
    name="decode",
    title="Decode bottleneck and time per output token (appendix A.7)",
    cells=_cells,
    page=_page,
    claims=_claims,
    excerpts={"decode": _excerpt},
)
