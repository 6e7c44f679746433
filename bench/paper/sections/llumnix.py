"""Cache-aware routing against round robin: the claims of Llumnix and of a stateful cache-aware router.

The stateful router (Stateful Cache-Aware Routing for Distributed LLM Inference, Purdue CS 59200, 2025) claims 30 to
50 % less TTFT than round robin on conversations. Llumnix's documentation gives no figures.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from bench.paper.cells import Cell, Figures
from bench.paper.claims import Claim
from bench.paper.measures import run_figures
from bench.paper.results import Results
from bench.paper.section import Section
from bench.paper.settings import CONVERSATION, OURS, RIVALS, TITLES, TOOL_AGENT, Extent, few_rates
from bench.paper.tables import change, number, table

_POLICIES: Final = ("round_robin", "cache_affinity_global", *RIVALS, *OURS)
_CLAIMED: Final = ("cache_affinity_global", "llumnix", "min_ttft", *OURS)
_CHATS: Final = "default"
_RATES: Final[Mapping[str, tuple[float, ...]]] = {
    CONVERSATION: (1.0, 2.0, 2.75),
    _CHATS: (3.0, 6.0, 8.0),
    TOOL_AGENT: (2.0, 4.0, 6.0),
}
"""A low rate, a medium rate, and a rate that overloads round robin."""
_FIGURES: Final = ("ttft_mean_s", "ttft_p50_s", "ttft_p90_s")


def _cell(extent: Extent, workload: str, rate: float, policy: str) -> Cell:
    return Cell(
        section="llumnix",
        name=f"{workload} {rate:g}/s {policy}",
        policy=policy,
        measure=partial(run_figures, extent.experiment(workload, "7b", 0, policy, rate)),
    )


def _workloads(extent: Extent) -> tuple[str, ...]:
    return (*extent.workloads, _CHATS)


def _cells(extent: Extent) -> Sequence[Cell]:
    return [
        _cell(extent, workload, rate, policy)
        for policy in _POLICIES
        for workload in _workloads(extent)
        for rate in few_rates(_RATES[workload], extent)
    ]


def runs(results: Results, extent: Extent) -> dict[str, dict[str, Figures]]:
    """Return the figures of all measured runs, by the run's title and the policy."""
    return {
        f"{TITLES[workload]} at {rate:g}/s": results.measured(
            {policy: _cell(extent, workload, rate, policy) for policy in _POLICIES}
        )
        for workload in _workloads(extent)
        for rate in few_rates(_RATES[workload], extent)
    }


def _page(results: Results, extent: Extent, _plots: Path) -> str:
    rows = []
    for workload in _workloads(extent):
        for rate in few_rates(_RATES[workload], extent):
            base = results.figures(_cell(extent, workload, rate, "round_robin"))
            for policy in _POLICIES:
                figures = results.figures(_cell(extent, workload, rate, policy))
                if figures is None or base is None:
                    continue
                rows.append(
                    [
                        TITLES[workload],
                        f"{rate:g}",
                        policy,
                        *(f"{number(figures[each])} ({change(figures[each], base[each], 0)})" for each in _FIGURES),
                        number(figures["hit_rate"], 1, 100) + " %",
                        number(figures["slo_attainment"], 1, 100) + " %",
                    ]
                )
    heads = ("workload", "requests/s", "policy", "TTFT mean s", "p50", "p90", "hit rate", "within SLO")
    return "In brackets against round robin.\n\n" + table(heads, rows)


def _claims(results: Results, extent: Extent) -> Sequence[Claim]:
    claims = []
    for workload in _workloads(extent):
        parts = []
        for policy in _CLAIMED:
            changes = []
            for rate in few_rates(_RATES[workload], extent):
                base, own = (results.figures(_cell(extent, workload, rate, each)) for each in ("round_robin", policy))
                if base is not None and own is not None:
                    changes.append(change(own["ttft_mean_s"], base["ttft_mean_s"], 0))
            if changes:
                parts.append(f"`{policy}` {', '.join(changes)}")
        rates = ", ".join(f"{rate:g}" for rate in few_rates(_RATES[workload], extent))
        claims.append(
            Claim(
                "Stateful router (Purdue 2025)",
                "TTFT 30 to 50 % below round robin's on conversations",
                (parts and f"{TITLES[workload]}, mean at {rates}/s: {'; '.join(parts)}") or "",
            )
        )
    return claims


SECTION: Final = Section(
    name="llumnix",
    title="Cache-aware routing against round robin",
    cells=_cells,
    page=_page,
    claims=_claims,
)
