"""Pending prefill tokens of every instance over time: hot instances (DualMap paper, Fig. 8), load and CV (Fig. 11).

An instance is hot if it cannot prefill its pending tokens within the SLO, the paper's threshold (section 3.2). The
paper names no rate. Here one rate is below and one is above the goodput of all variants of DualMap.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import sqrt
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Final

from bench.paper.cells import Cell, Figures
from bench.paper.charts import colour, finish, grid, legend, save
from bench.paper.claims import Claim
from bench.paper.results import Results
from bench.paper.section import Section
from bench.paper.settings import BASELINES, CONVERSATION, OTHERS, OURS, TITLES, TOOL_AGENT, WARMUP, Extent
from bench.paper.tables import number, table

from dualmap.pools.pool import Prefix, Queue, Routing
from dualmap_sim.experiment import Experiment, run_experiment
from dualmap_sim.records import LoadSample

_MODEL: Final = "7b"
_FIG_8: Final = ("dualmap_no_rebalance", "dualmap_paper", "dualmap")
"""The policies of the heat map. The paper shows DualMap without naming the variant, as the reason for rebalancing."""
_POLICIES: Final = ("dualmap_no_rebalance", *OURS, *BASELINES, *OTHERS)
_FIG_11: Final = (*OURS, *BASELINES)
_RATES: Final[Mapping[str, tuple[float, float]]] = {CONVERSATION: (2.5, 4.0), TOOL_AGENT: (6.0, 9.0)}
_VARIANTS: Final[Mapping[str, tuple[str, Routing]]] = MappingProxyType(
    {
        "dualmap without deferring": ("dualmap", Routing(queue=Queue(max_overtaken=0))),
        "dualmap_no_rebalance with keys of 2 blocks": ("dualmap_no_rebalance", Routing(prefix=Prefix(max_blocks=2))),
    }
)
"""Policies with one feature turned off, which show the reason for a figure."""
_SHOWN: Final = (*_POLICIES, *_VARIANTS)
_SLOTS: Final = 60
"""Points of a series over the run."""
_LONG_S: Final = 60.0


def load_over_time(experiment: Experiment) -> Figures:
    """Run an experiment; return the pending tokens over time, their CV, and the share of time with hot instances."""
    outcome = run_experiment(experiment)
    counted = outcome.records[experiment.warmup :]
    first_s, last_s = counted[0].arrival.at_s, counted[-1].arrival.at_s
    samples = [each for each in outcome.samples if first_s <= each.at_s <= last_s]
    hot_tokens = experiment.slo_ttft_s * experiment.engine.prefill.tokens_per_s
    hot = [[tokens > hot_tokens for tokens in each.pending_tokens.values()] for each in samples]
    slots = [slot for slot in _cut(samples, (last_s - first_s) / _SLOTS) if slot]
    means = [_means(slot) for slot in slots]
    heavy = [each for each in samples if fmean(each.pending_tokens.values()) > hot_tokens / 2]
    minutes = [_cv(_means(slot)) for slot in _cut(samples, _LONG_S) if slot]
    return {
        "slo_attainment": outcome.summary.slo_attainment,
        "hit_rate": outcome.summary.hit_rate,
        "pending_tokens": fmean(fmean(each.pending_tokens.values()) for each in samples),
        "pending_cv": outcome.summary.pending_cv,
        "cv_of_minutes": _mean([cv for cv in minutes if cv is not None]),
        "cv_when_heavy": _mean([cv for each in heavy if (cv := _cv(list(each.pending_tokens.values()))) is not None]),
        "heavy_share": len(heavy) / len(samples),
        "hot_share": fmean(fmean(each) for each in hot),
        "some_hot_share": fmean(any(each) for each in hot),
        "hot_beside_cold_share": fmean(any(each) and sum(each) <= len(each) // 2 for each in hot),
        "slot_s": (last_s - first_s) / _SLOTS,
        "instances": [[round(tokens) for tokens in each] for each in means],
        "cvs": [
            _mean([cv for each in slot if (cv := _cv(list(each.pending_tokens.values()))) is not None])
            for slot in slots
        ],
    }


def _cut(samples: Sequence[LoadSample], every_s: float) -> list[list[LoadSample]]:
    """Return the samples in slots of equal duration."""
    slots: list[list[LoadSample]] = []
    for sample in samples:
        slot = min(int((sample.at_s - samples[0].at_s) / every_s), len(samples))
        slots += [[] for _ in range(slot + 1 - len(slots))]
        slots[slot].append(sample)
    return slots


def _means(samples: Sequence[LoadSample]) -> list[float]:
    """Return each instance's mean."""
    return [fmean(column) for column in zip(*(each.pending_tokens.values() for each in samples), strict=True)]


def _cv(loads: Sequence[float]) -> float | None:
    """Return the coefficient of variation (equation 1 of the paper), None without load."""
    mean = fmean(loads)
    return sqrt(fmean((each - mean) ** 2 for each in loads)) / mean if mean else None


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def _cell(extent: Extent, workload: str, rate: float, name: str) -> Cell:
    """Return the cell of a policy or of a variant."""
    policy, routing = _VARIANTS.get(name, (name, Routing()))
    experiment = replace(extent.experiment(workload, _MODEL, 0, policy, rate), routing=routing)
    return Cell(
        section="load",
        name=f"{workload} {rate:g}/s {name}",
        policy=policy,
        measure=partial(load_over_time, experiment),
    )


def _settings(extent: Extent) -> list[tuple[str, float]]:
    return [(workload, rate) for workload in extent.workloads for rate in _RATES[workload]]


def _cells(extent: Extent) -> Sequence[Cell]:
    return [_cell(extent, *setting, policy) for policy in _SHOWN for setting in _settings(extent)]


def _found(results: Results, extent: Extent, workload: str, rate: float) -> dict[str, Figures]:
    kept = {policy: results.figures(_cell(extent, workload, rate, policy)) for policy in _SHOWN}
    return {policy: figures for policy, figures in kept.items() if figures is not None}


_COLUMNS: Final = (
    ("slo_attainment", "within SLO %", 1, 100.0),
    ("hit_rate", "hit rate %", 1, 100.0),
    ("pending_tokens", "pending tokens an instance", 0, 1.0),
    ("pending_cv", "CV", 2, 1.0),
    ("cv_of_minutes", "CV of the minutes' means", 2, 1.0),
    ("cv_when_heavy", "CV while the load is heavy", 2, 1.0),
    ("heavy_share", "time with heavy load %", 1, 100.0),
    ("hot_share", "hot instances %", 1, 100.0),
    ("some_hot_share", "time with a hot instance %", 1, 100.0),
    ("hot_beside_cold_share", "time with a hot instance, but at most half %", 1, 100.0),
)


def _page(results: Results, extent: Extent, plots: Path) -> str:
    parts = [
        f"Engine 7b, first window, samples every second without the first {WARMUP} requests. An instance is hot if its "
        "pending tokens take longer than the SLO to prefill. The load is heavy if the instances have on average more "
        "than half of that.\n\n"
        "![pending tokens of each instance](load_hot.png)\n\n![pending tokens and CV over time](load_series.png)\n\n"
    ]
    for workload, rate in _settings(extent):
        found = _found(results, extent, workload, rate)
        rows = [
            [policy, *(number(each[name], digits, scale) for name, _, digits, scale in _COLUMNS)]
            for policy, each in found.items()
        ]
        parts.append(f"## {TITLES[workload]} at {rate:g}/s\n\n")
        parts.append(table(("policy", *(title for _, title, *_ in _COLUMNS)), rows) + "\n")
    _draw_hot(results, extent, plots)
    _draw_series(results, extent, plots)
    return "".join(parts)


def _excerpt(results: Results, extent: Extent) -> str:
    """Return the shares of time with a hot instance, and the load and its balance, at each rate."""
    names = ("slo_attainment", "hit_rate", "pending_tokens", "cv_of_minutes", "some_hot_share")
    columns = [each for each in _COLUMNS if each[0] in names]
    rows = [
        [
            f"{TITLES[workload]} at {rate:g}/s",
            policy,
            *(number(each[name], digits, scale) for name, _, digits, scale in columns),
        ]
        for workload, rate in _settings(extent)
        for policy, each in _found(results, extent, workload, rate).items()
        if policy in (*_FIG_8, *_FIG_11, *_VARIANTS)
    ]
    return table(("run", "policy", *(title for _, title, *_ in columns)), rows)


def _draw_hot(results: Results, extent: Extent, plots: Path) -> None:
    """Draw a map of every instance's pending tokens over time (Fig. 8): bright yellow is hot."""
    settings = _settings(extent)
    figure, axes = grid(len(settings), len(_FIG_8))
    for row, (workload, rate) in zip(axes, settings, strict=True):
        found = _found(results, extent, workload, rate)
        hot_tokens = 5.0 * extent.experiment(workload, _MODEL, 0, "dualmap").engine.prefill.tokens_per_s
        for place, policy in zip(row, _FIG_8, strict=True):
            finish(place, f"{TITLES[workload]} at {rate:g}/s: {policy}", across="minutes")
            place.grid(visible=False)
            if policy in found:
                columns = list(zip(*found[policy]["instances"], strict=True))
                end_min = found[policy]["slot_s"] * len(columns[0]) / 60
                extent_of = (0.0, end_min, len(columns) - 0.5, -0.5)
                place.imshow(columns, aspect="auto", vmin=0.0, vmax=hot_tokens, cmap="viridis", extent=extent_of)
    save(figure, plots / "load_hot.png")


def _draw_series(results: Results, extent: Extent, plots: Path) -> None:
    """Draw the pending tokens of all instances and their CV over time (Fig. 11)."""
    settings = _settings(extent)
    figure, axes = grid(len(settings), 2)
    for row, (workload, rate) in zip(axes, settings, strict=True):
        found = _found(results, extent, workload, rate)
        for policy in _FIG_11:
            if policy not in found:
                continue
            series = found[policy]
            minutes = [number_ * series["slot_s"] / 60 for number_ in range(len(series["cvs"]))]
            pending = [sum(each) / 1000 for each in series["instances"]]
            row[0].plot(minutes, pending, color=colour(policy), linewidth=1.1)
            cvs = [float("nan") if each is None else each for each in series["cvs"]]
            row[1].plot(minutes, cvs, color=colour(policy), linewidth=1.1)
        finish(row[0], f"{TITLES[workload]} at {rate:g}/s: pending tokens, thousands", across="minutes")
        finish(row[1], f"{TITLES[workload]} at {rate:g}/s: CV over instances", across="minutes")
    legend(figure, _FIG_11)
    save(figure, plots / "load_series.png")


def _claims(results: Results, extent: Extent) -> Sequence[Claim]:
    return [
        *_hot_claims(results, extent),
        *(claim for each in extent.workloads for claim in _of(results, extent, each)),
    ]


def _hot_claims(results: Results, extent: Extent) -> Sequence[Claim]:
    parts = []
    for workload, rate in _settings(extent):
        found = _found(results, extent, workload, rate)
        shown = ", ".join(f"`{each}` {found[each]['some_hot_share']:.1%}" for each in _FIG_8 if each in found)
        if shown:
            parts.append(f"{TITLES[workload]} at {rate:g}/s: {shown}")
    return [
        Claim(
            "A.1.2, Fig. 8",
            "hot instances emerge frequently under DualMap, particularly with Tool&Agent",
            f"share of the time with a hot instance. {'; '.join(parts)}" if parts else "",
        )
    ]


def _of(results: Results, extent: Extent, workload: str) -> Sequence[Claim]:
    pending, cvs = [], []
    for rate in _RATES[workload]:
        found = _found(results, extent, workload, rate)
        if not found:
            continue
        shown = [each for each in _FIG_11 if each in found]
        thousands = ", ".join(f"`{each}` {found[each]['pending_tokens'] / 1000:.1f}" for each in shown)
        minutes = ", ".join(f"`{each}` {number(found[each]['cv_of_minutes'])}" for each in shown)
        pending.append(f"at {rate:g}/s {thousands}")
        cvs.append(f"at {rate:g}/s {minutes}")
    title = TITLES[workload]
    return [
        Claim(
            "A.2.2, Fig. 11a, 11c",
            f"{title}: DualMap's pending tokens stay low, Least Loaded's are much higher, Cache Affinity's accumulate",
            f"thousand tokens an instance, {'; '.join(pending)}" if pending else "",
        ),
        Claim(
            "A.2.2, Fig. 11b, 11d",
            f"{title}: Least Loaded has CV 0 over time, DualMap a low CV",
            f"CV of the means of a minute, {'; '.join(cvs)}" if cvs else "",
        ),
    ]


SECTION: Final = Section(
    name="load",
    title="Load of the instances over time (Figures 8, 11)",
    cells=_cells,
    page=_page,
    claims=_claims,
    excerpts={"load": _excerpt},
)
