"""Goodput: the highest rate at which 90 % of the requests get the first token within 5 s (DualMap paper, 4.2, Fig. 3).

Runs cover both workloads and all three models. All policies and the theoretical bounds run in three windows. Other
sections reuse single cells of this section.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from math import inf
from pathlib import Path
from typing import Final

from bench.paper.cells import Cell
from bench.paper.charts import INK, bars, finish, grid, legend, save
from bench.paper.claims import Claim
from bench.paper.measures import goodput_figures
from bench.paper.results import Results
from bench.paper.section import Section
from bench.paper.settings import BOUNDS, CONVERSATION, MODELS, OURS, RIVALS, TITLES, TOOL_AGENT, Extent
from bench.paper.tables import Spread, table

_SHOWN: Final = (*OURS, *RIVALS, *BOUNDS)


def cell(extent: Extent, workload: str, model: str, window: int, policy: str) -> Cell:
    """Return the cell of one policy's goodput in one window."""
    experiment = extent.experiment(workload, model, window, policy)
    return Cell(
        section="goodput",
        name=f"{workload} {model} window {window} {policy}",
        policy=policy,
        measure=partial(goodput_figures, experiment),
    )


def spread(results: Results, extent: Extent, workload: str, model: str, policy: str) -> Spread:
    """Return a policy's goodput in the measured windows."""
    return Spread.of(_found(results, extent, workload, model, policy).values())


def _found(results: Results, extent: Extent, workload: str, model: str, policy: str) -> dict[int, float]:
    """Return a policy's goodput by window, without the windows that have none."""
    kept = {w: results.figures(cell(extent, workload, model, w, policy)) for w in extent.windows}
    return {w: each["goodput_qps"] for w, each in kept.items() if each and each["goodput_qps"] is not None}


def _cells(extent: Extent) -> Sequence[Cell]:
    return [
        cell(extent, workload, model, window, policy)
        for policies in (BOUNDS, RIVALS, OURS)
        for window in extent.windows
        for workload in extent.workloads
        for model in MODELS
        for policy in policies
    ]


_Rates = Mapping[int, float]
"""Goodput by window."""


def _page(results: Results, extent: Extent, plots: Path) -> str:
    columns = [(workload, model) for workload in extent.workloads for model in MODELS]
    found = {(policy, *c): _found(results, extent, *c, policy) for policy in _SHOWN for c in columns}
    names = [f"{TITLES[workload]} {model}" for workload, model in columns]
    absolute = table(
        ("goodput, requests/s", *names),
        [[policy, *(Spread.of(found[policy, *c].values()).show() for c in columns)] for policy in _SHOWN],
    )
    shares = {(policy, *c): _shares(found[policy, *c], found["limit", *c]) for policy in _SHOWN for c in columns}
    relative = table(
        ("% of `limit`", *names),
        [
            [policy, *(Spread.of(shares[policy, *c]).show(1, 100) for c in columns)]
            for policy in _SHOWN
            if policy != "limit"
        ],
    )
    gains = table(
        ("over the best other policy", *names),
        [[policy, *(_gain(found[policy, *c], {p: found[p, *c] for p in RIVALS}) for c in columns)] for policy in OURS],
    )
    prices = table(
        ("TTFT P99.9, s; refused, % of requests", *names),
        [[policy, *(_price(results, extent, *c, policy) for c in columns)] for policy in _SHOWN],
    )
    shown = [policy for policy in _SHOWN if policy != "limit"]
    figure, axes = grid(len(extent.workloads), len(MODELS))
    places = [each for row in axes for each in row]
    for place, (workload, model) in zip(places, columns, strict=True):
        bars(place, shown, [[100 * each for each in shares[policy, workload, model]] for policy in shown])
        place.axhline(100, color=INK, linewidth=0.8, linestyle=":")
        finish(place, f"{TITLES[workload]}, {model}: goodput, % of limit")
    legend(figure, shown)
    save(figure, plots / "goodput.png")
    return (
        f"Windows: {len(extent.windows)}; the single windows' range is in brackets. All policies run at shipped "
        f"defaults. Gains name the best other policy.\n\n{absolute}\n{relative}\n{gains}\n"
        f"At the goodput, in the worst window. A router rejects a request that was queued for 30 s.\n\n{prices}\n"
        "![goodput](goodput.png)\n"
    )


def _price(results: Results, extent: Extent, workload: str, model: str, policy: str) -> str:
    """Return TTFT P99.9 and the share of rejected requests at the goodput, in the worst window."""
    kept = [results.figures(cell(extent, workload, model, w, policy)) for w in extent.windows]
    told = [each for each in kept if each and "ttft_p999_s" in each]
    if not told:
        return "-"
    refused = max(each["refused_share"] for each in told)
    return f"{max(each['ttft_p999_s'] for each in told):.0f}; {100 * refused:.2f}"


def _shares(rates: _Rates, of: _Rates) -> list[float]:
    return [rates[window] / of[window] for window in rates if of.get(window)]


def _gain(ours: _Rates, rivals: Mapping[str, _Rates]) -> str:
    """Return our gain in goodput over the best other policy, and its name.

    Each comparison covers the windows of both policies.
    """
    gains = []
    for name, other in rivals.items():
        both = [window for window in ours if window in other]
        if both:
            before = sum(other[window] for window in both)
            gains.append((sum(ours[window] for window in both) / before if before else inf, name))
    if not gains:
        return "-"
    gain, name = min(gains)
    return f"{100 * (gain - 1):+.1f} % `{name}`"


def _claims(results: Results, extent: Extent) -> Sequence[Claim]:
    says = {CONVERSATION: ("Fig. 3a, 3c", "+14.3 to +40 %"), TOOL_AGENT: ("Fig. 3b, 3d", "+16.7 to +48 %")}
    claims = []
    for workload in extent.workloads:
        found = {(p, m): _found(results, extent, workload, m, p) for p in _SHOWN for m in MODELS}
        measured = "; ".join(
            f"`{policy}` "
            + ", ".join(f"{_gain(found[policy, m], {p: found[p, m] for p in RIVALS})} ({m})" for m in MODELS)
            for policy in OURS
        )
        source, gain = says[workload]
        claims.append(
            Claim(f"4.2, {source}", f"{TITLES[workload]}: goodput {gain} over the best baseline (7B, 14B)", measured)
        )
    return claims


SECTION: Final = Section(
    name="goodput",
    title="Goodput (Figure 3)",
    cells=_cells,
    page=_page,
    claims=_claims,
)
