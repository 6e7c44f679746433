"""The number of candidates: d = 1 to 4 (DualMap paper, sections 2.3, A.8, Fig. 15), by the theory and by goodput.

The theory throws balls, each into the least full of d bins drawn at random. The goodput is that of the published rule
with d candidates instead of a pair. The candidates are the first d members after a key on core's ring. Rebalancing is
off, because it needs pairs.
"""

import random
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import islice
from math import log
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import ClassVar, Final
from unittest.mock import patch

from bench.paper.cells import Cell, Figures
from bench.paper.charts import INK, finish, grid, save
from bench.paper.claims import Claim
from bench.paper.measures import goodput_figures
from bench.paper.results import Results
from bench.paper.section import Section
from bench.paper.settings import TITLES, Extent
from bench.paper.tables import number, table

from dualmap.policies.pair.dualmap_no_rebalance import DualMapNoRebalance
from dualmap.policies.registry import POLICIES
from dualmap.policies.situation import Choice, Rule, Situation
from dualmap_sim.experiment import Experiment

_CHOICES: Final = (1, 2, 3, 4)
_BINS: Final = (8, 16, 24, 32)
_BALLS_EACH: Final = 1000
_THROWS: Final = 10
_MODEL: Final = "7b"
_WARM: Final = Rule("warmest", "of its candidates it holds most of the prompt, and meets the SLO")
_LESS_LOADED: Final = Rule("less-loaded", "the warmest would miss the SLO, and it has no more prefill pending")


class OfSeveral(DualMapNoRebalance):
    """DualMap's published choice (section 3.2) among ``candidates`` members instead of two."""

    name: ClassVar[str] = "of_several"
    source: ClassVar[str] = "DualMap sections 2.3 and 3.2"
    summary: ClassVar[str] = "the warmest of d candidates within the SLO, else the least loaded of them"

    def __init__(self, candidates: int) -> None:
        self._candidates = candidates

    def choose(self, situation: Situation) -> Choice:
        """Return a choice among the first members after the key on the ring."""
        candidates = [situation.everyone[place] for place in islice(situation.ring_walk(), self._candidates)]
        warm = situation.least(candidates, lambda each: (-each.matched_tokens, each.pending_tokens))
        if situation.waited_s + warm.ttft_s <= situation.slo_ttft_s:
            return Choice(warm, _WARM)
        return Choice(situation.least(candidates, lambda each: (each.pending_tokens, each.in_flight)), _LESS_LOADED)


def goodput_of(experiment: Experiment, candidates: int) -> Figures:
    """Search the goodput of the published rule with this number of candidates."""
    with known(candidates):
        return goodput_figures(experiment)


def known(candidates: int) -> AbstractContextManager[object]:
    """Register the policy with core for the duration of the context, because core selects policies by name."""
    return patch("dualmap.chooser.POLICIES", MappingProxyType({**POLICIES, OfSeveral.name: OfSeveral(candidates)}))


def deviation(bins: int, candidates: int) -> Figures:
    """Throw balls, each into the least full of several bins; return how far the fullest bin exceeds the mean.

    Each ball draws ``candidates`` bins at random. The result is the mean of maximum minus mean load over ``_THROWS``
    repetitions.
    """
    rng = random.Random(f"{bins} {candidates}")
    excesses = []
    for _ in range(_THROWS):
        loads = [0] * bins
        for _ in range(bins * _BALLS_EACH):
            drawn = [rng.randrange(bins) for _ in range(candidates)]
            least = min(drawn, key=loads.__getitem__)
            loads[least] += 1
        excesses.append(max(loads) - _BALLS_EACH)
    return {"deviation": fmean(excesses)}


def _deviation_cell(bins: int, candidates: int) -> Cell:
    return Cell(
        section="choices",
        name=f"balls into {bins} bins, d = {candidates}",
        policy="theory",
        measure=partial(deviation, bins, candidates),
    )


def _goodput_cell(extent: Extent, workload: str, candidates: int) -> Cell:
    experiment = extent.experiment(workload, _MODEL, 0, OfSeveral.name)
    return Cell(
        section="choices",
        name=f"goodput {workload} d = {candidates}",
        policy=OfSeveral.name,
        measure=partial(goodput_of, experiment, candidates),
    )


def _every(extent: Extent) -> tuple[int, ...]:
    """Return the numbers of candidates in the goodput measurement, up to all members."""
    return (*_CHOICES, 8)


def _cells(extent: Extent) -> Sequence[Cell]:
    theory = [_deviation_cell(bins, candidates) for bins in _BINS for candidates in _CHOICES]
    return [
        *theory,
        *(
            _goodput_cell(extent, workload, candidates)
            for workload in extent.workloads
            for candidates in _every(extent)
        ),
    ]


def _page(results: Results, extent: Extent, plots: Path) -> str:
    balls = {
        (bins, candidates): figures["deviation"]
        for bins in _BINS
        for candidates in _CHOICES
        if (figures := results.figures(_deviation_cell(bins, candidates))) is not None
    }
    rows = [
        [
            f"{bins}",
            *(number(balls.get((bins, candidates)), 1) for candidates in _CHOICES),
            f"{log(log(bins)) / log(2):.1f}",
        ]
        for bins in _BINS
    ]
    text = "Maximum load minus mean load, 1000 balls a bin:\n\n"
    text += table(("instances", *(f"d = {each}" for each in _CHOICES), "log log n / log 2"), rows)
    goodputs = {
        (workload, candidates): figures["goodput_qps"]
        for workload in extent.workloads
        for candidates in _every(extent)
        if (figures := results.figures(_goodput_cell(extent, workload, candidates))) is not None
    }
    text += "\nGoodput of the published rule with d candidates (8 instances, 7b, first window), requests/s:\n\n"
    rows = [[TITLES[each], *(number(goodputs.get((each, d))) for d in _every(extent))] for each in extent.workloads]
    text += table(("workload", *(f"d = {each}" for each in _every(extent))), rows)
    figure, axes = grid(1, 1 + len(extent.workloads))
    for bins, style in zip(_BINS, ("-", "--", "-.", ":"), strict=True):
        points = [(d, balls[bins, d]) for d in _CHOICES if (bins, d) in balls]
        axes[0][0].plot(*zip(*points, strict=True), style, color=INK, marker="o", markersize=3, label=f"n = {bins}")
    axes[0][0].set_yscale("log")
    axes[0][0].legend(frameon=False, fontsize=8)
    axes[0][0].set_xticks(_CHOICES)
    finish(axes[0][0], "maximum load minus mean", across="candidates d")
    for place, workload in zip(axes[0][1:], extent.workloads, strict=True):
        rates = {f"{d}": goodputs[workload, d] for d in _every(extent) if goodputs.get((workload, d))}
        place.bar(list(rates), list(rates.values()), 0.6, color="#c2571a")
        finish(place, f"{TITLES[workload]}: goodput, requests/s", across="candidates d")
    save(figure, plots / "choices.png")
    return f"{text}\n![choices](choices.png)\n"


def _claims(results: Results, extent: Extent) -> Sequence[Claim]:
    balls = []
    for bins in (8, 32):
        kept = [results.figures(_deviation_cell(bins, d)) for d in _CHOICES]
        balls.append(f"n = {bins}: {', '.join('-' if each is None else number(each['deviation'], 1) for each in kept)}")
    real = []
    for workload in extent.workloads:
        kept = [results.figures(_goodput_cell(extent, workload, d)) for d in _every(extent)]
        rates = ", ".join("-" if each is None else number(each["goodput_qps"]) for each in kept)
        real.append(f"{TITLES[workload]} {rates}/s")
    return (
        Claim(
            "A.8, Fig. 15",
            "the maximum load's deviation falls sharply from d = 1 to 2, hardly beyond",
            "; ".join(balls),
        ),
        Claim(
            "2.3",
            "more than two candidates cost more in cache locality than they gain",
            f"goodput with d = 1, 2, 3, 4, 8: {'; '.join(real)}",
        ),
    )


SECTION: Final = Section(
    name="choices", title="How many candidates (Figure 15)", cells=_cells, page=_page, claims=_claims
)
