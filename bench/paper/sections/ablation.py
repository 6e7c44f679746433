"""The DualMap paper's ablation (section 4.3, Fig. 5): five variants of DualMap and its default."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final

from bench.paper.cells import Cell
from bench.paper.charts import bars, finish, grid, legend, save
from bench.paper.claims import Claim
from bench.paper.measures import goodput_figures, run_figures
from bench.paper.results import Results
from bench.paper.section import Section
from bench.paper.sections import goodput
from bench.paper.settings import CONVERSATION, Extent
from bench.paper.tables import Spread, change, number, table

_MODEL: Final = "14b"
_RATES: Final = (2.25, 2.75)
_PUBLISHED: Final = (
    "dualmap_cache_affinity",
    "dualmap_least_loaded",
    "dualmap_min_ttft",
    "dualmap_no_rebalance",
    "dualmap_paper",
)
_POLICIES: Final = (*_PUBLISHED, "dualmap")
_FIGURES: Final = (
    ("slo_attainment", "within SLO %", 1, 100.0),
    ("ttft_p50_s", "TTFT p50 s", 2, 1.0),
    ("ttft_p90_s", "TTFT p90 s", 2, 1.0),
    ("hit_rate", "hit rate %", 1, 100.0),
    ("pending_cv", "CV", 2, 1.0),
)


def _run(extent: Extent, rate: float, window: int, policy: str) -> Cell:
    return Cell(
        section="ablation",
        name=f"{rate:g}/s window {window} {policy}",
        policy=policy,
        measure=partial(run_figures, extent.experiment(CONVERSATION, _MODEL, window, policy, rate)),
    )


def _goodput(extent: Extent, window: int, policy: str) -> Cell:
    if policy in ("dualmap", "dualmap_paper"):
        return goodput.TRACES.cell(extent, CONVERSATION, _MODEL, window, policy)
    return Cell(
        section="ablation",
        name=f"goodput window {window} {policy}",
        policy=policy,
        measure=partial(goodput_figures, extent.experiment(CONVERSATION, _MODEL, window, policy)),
    )


def _cells(extent: Extent) -> Sequence[Cell]:
    if CONVERSATION not in extent.workloads:
        return ()
    runs = [
        _run(extent, rate, window, policy) for policy in _POLICIES for window in extent.windows() for rate in _RATES
    ]
    return [*runs, *(_goodput(extent, 0, policy) for policy in _POLICIES)]


def _spread(results: Results, extent: Extent, rate: float, policy: str, name: str) -> Spread:
    kept = (results.figures(_run(extent, rate, window, policy)) for window in extent.windows())
    return Spread.of(figures[name] for figures in kept if figures is not None)


def _page(results: Results, extent: Extent, plots: Path) -> str:
    if CONVERSATION not in extent.workloads:
        return "Left out: the Conversation trace is not here.\n"
    found = {
        (policy, rate, name): _spread(results, extent, rate, policy, name)
        for policy in _POLICIES
        for rate in _RATES
        for name, *_ in _FIGURES
    }
    kept = {policy: results.figures(_goodput(extent, 0, policy)) for policy in _POLICIES}
    goodputs = {policy: None if each is None else each["goodput_qps"] for policy, each in kept.items()}
    rows = [
        [
            policy,
            f"{rate:g}",
            *(found[policy, rate, name].show(digits, scale) for name, _, digits, scale in _FIGURES),
            number(goodputs[policy]),
        ]
        for rate in _RATES
        for policy in _POLICIES
    ]
    text = table(
        ("configuration", "requests/s", *(title for _, title, *_ in _FIGURES), "goodput/s (first window)"), rows
    )
    steps = [
        [f"{after} against {before}", f"{rate:g}"]
        + [
            change(found[after, rate, each].mean, found[before, rate, each].mean)
            for each in ("ttft_p50_s", "ttft_p90_s")
        ]
        for rate in _RATES
        for before, after in (
            ("dualmap_min_ttft", "dualmap_no_rebalance"),
            ("dualmap_no_rebalance", "dualmap_paper"),
            ("dualmap_paper", "dualmap"),
        )
    ]
    text += "\n" + table(("step", "requests/s", "TTFT p50", "TTFT p90"), steps)
    figure, axes = grid(1, len(_FIGURES))
    rate = _RATES[-1]
    for place, (name, title, _, scale) in zip(axes[0], _FIGURES, strict=True):
        values = [[scale * each for each in found[policy, rate, name].values] for policy in _POLICIES]
        bars(place, _POLICIES, values)
        finish(place, f"{title} at {rate:g}/s")
    legend(figure, _POLICIES)
    save(figure, plots / "ablation.png")
    return f"{text}\n![ablation](ablation.png)\n"


def _claims(results: Results, extent: Extent) -> Sequence[Claim]:
    if CONVERSATION not in extent.workloads:
        return ()

    def step(before: str, after: str, name: str) -> str:
        shown = []
        for rate in _RATES:
            was, now = (_spread(results, extent, rate, policy, name).mean for policy in (before, after))
            shown.append(f"{change(now, was)} at {rate:g}/s")
        return ", ".join(shown)

    published = [
        (Spread.of([_spread(results, extent, _RATES[-1], policy, "ttft_p90_s").mean]), policy) for policy in _PUBLISHED
    ]
    order = ", ".join(f"`{policy}` {spread.show()} s" for spread, policy in published if spread.values)
    choice, moves = ("dualmap_min_ttft", "dualmap_no_rebalance"), ("dualmap_no_rebalance", "dualmap_paper")
    return (
        Claim("4.3, Fig. 5", "SLO-aware choice against Min TTFT of the pair: P50 -23.5 %", step(*choice, "ttft_p50_s")),
        Claim("4.3, Fig. 5", "... P90 -18.5 %", step(*choice, "ttft_p90_s")),
        Claim("4.3, Fig. 5", "rebalancing: P90 a further -11.3 %", step(*moves, "ttft_p90_s")),
        Claim("4.3, Fig. 5", "cache affinity of the pair has the highest TTFT", f"P90 at {_RATES[-1]:g}/s: {order}"),
    )


SECTION: Final = Section(
    name="ablation",
    title="Ablation on Conversation, 14b (Figure 5)",
    cells=_cells,
    page=_page,
    claims=_claims,
)
