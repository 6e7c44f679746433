"""Compares the goodput of all policies on several workloads and models: the sections ``goodput`` and ``chats``.

All policies and the theoretical bounds run in every window or seed. A column of a page is a workload with a model.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from typing import Final

from bench.paper.cells import Cell
from bench.paper.charts import INK, bars, finish, grid, legend, save
from bench.paper.measures import goodput_figures
from bench.paper.results import Results
from bench.paper.settings import BOUNDS, DEFAULT_POLICY, OURS, RIVALS, TITLES, Extent
from bench.paper.tables import Spread, number, table

_SHOWN: Final = (*OURS, *RIVALS, *BOUNDS)

Column = tuple[str, str]
"""A workload and a model."""
_Rates = Mapping[int, float]
"""Goodput by window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The goodput of all policies on some workloads and models, in every window or seed."""

    section: str
    workloads: Callable[[Extent], tuple[str, ...]]
    models: tuple[str, ...]
    windows: int

    def cell(self, extent: Extent, workload: str, model: str, window: int, policy: str) -> Cell:
        """Return the cell of one policy's goodput in one window."""
        return Cell(
            section=self.section,
            name=f"{workload} {model} window {window} {policy}",
            policy=policy,
            measure=partial(goodput_figures, extent.experiment(workload, model, window, policy)),
        )

    def cells(self, extent: Extent) -> Sequence[Cell]:
        """Return all cells, those of our policies last."""
        return [
            self.cell(extent, workload, model, window, policy)
            for policies in (BOUNDS, RIVALS, OURS)
            for window in extent.windows(self.windows)
            for workload, model in self.columns(extent)
            for policy in policies
        ]

    def columns(self, extent: Extent) -> list[Column]:
        """Return the columns of the pages' tables."""
        return [(workload, model) for workload in self.workloads(extent) for model in self.models]

    def spread(self, results: Results, extent: Extent, workload: str, model: str, policy: str) -> Spread:
        """Return a policy's goodput in the measured windows."""
        return Spread.of(self._found(results, extent, (workload, model), policy).values())

    def gain(self, results: Results, extent: Extent, workload: str, model: str, policy: str) -> str:
        """Return a policy's gain in goodput over the best other policy, and its name, or a dash.

        Each comparison covers the windows of both policies.
        """
        ours, gains = self._found(results, extent, (workload, model), policy), []
        for name in RIVALS:
            other = self._found(results, extent, (workload, model), name)
            both = [window for window in ours if window in other]
            if both:
                before = sum(other[window] for window in both)
                gains.append((sum(ours[window] for window in both) / before if before else inf, name))
        if not gains:
            return "-"
        gain, name = min(gains)
        return f"{100 * (gain - 1):+.1f} % `{name}`"

    def page(self, results: Results, extent: Extent, plots: Path) -> str:
        """Return the tables of a page, and draw its plot."""
        columns = self.columns(extent)
        found = {(policy, c): self._found(results, extent, c, policy) for policy in _SHOWN for c in columns}
        names = [_title(column) for column in columns]
        absolute = table(
            ("goodput, requests/s", *names),
            [[policy, *(Spread.of(found[policy, c].values()).show() for c in columns)] for policy in _SHOWN],
        )
        shown = [policy for policy in _SHOWN if policy != "limit"]
        shares = {(policy, c): _shares(found[policy, c], found["limit", c]) for policy in _SHOWN for c in columns}
        relative = table(
            ("% of `limit`", *names),
            [[policy, *(Spread.of(shares[policy, c]).show(1, 100) for c in columns)] for policy in shown],
        )
        gains = table(
            ("over the best other policy", *names),
            [[policy, *(self.gain(results, extent, *c, policy) for c in columns)] for policy in OURS],
        )
        prices = table(
            ("TTFT P99.9, s; refused, % of requests", *names),
            [[policy, *(self._price(results, extent, c, policy) for c in columns)] for policy in _SHOWN],
        )
        figure, axes = grid(len(self.workloads(extent)), len(self.models))
        places = [each for row in axes for each in row]
        for place, column in zip(places, columns, strict=True):
            bars(place, shown, [[100 * each for each in shares[policy, column]] for policy in shown])
            place.axhline(100, color=INK, linewidth=0.8, linestyle=":")
            finish(place, f"{_title(column)}: goodput, % of limit")
        legend(figure, shown)
        save(figure, plots / f"{self.section}.png")
        return (
            f"Windows or seeds: {len(extent.windows(self.windows))}; the range of the single ones is in brackets. All "
            "policies run at shipped defaults, except that `cache_affinity` has blocks of 512 tokens instead of 128. "
            f"Gains name the best other policy.\n\n{absolute}\n{relative}\n{gains}\n{self.not_ahead(results, extent)}\n"
            f"At the goodput, in the worst window. A router rejects a request that was queued for 30 s.\n\n{prices}\n"
            f"![goodput]({self.section}.png)\n"
        )

    def excerpt(self, results: Results, extent: Extent) -> str:
        """Return the default policy's goodput against the bounds and the other policies, a row for each column."""
        rows = []
        for column in self.columns(extent):
            found = {
                policy: self._found(results, extent, column, policy)
                for policy in (DEFAULT_POLICY, "limit", "limit_deadline")
            }
            ours, bound, deadline = found.values()
            rows.append(
                [
                    _title(column),
                    Spread.of(ours.values()).show(),
                    Spread.of(_shares(ours, bound)).show(1, 100),
                    Spread.of(_shares(deadline, bound)).show(1, 100),
                    *(self.gain(results, extent, *column, policy) for policy in OURS),
                ]
            )
        heads = ("goodput", f"`{DEFAULT_POLICY}`, requests/s", "% of `limit`", "`limit_deadline`, % of `limit`")
        gains = (f"`{policy}` against the best other policy" for policy in OURS)
        return f"{table((*heads, *gains), rows)}\n{self.not_ahead(results, extent)}"

    def not_ahead(self, results: Results, extent: Extent) -> str:
        """Return the list of the windows in which another policy has at least the goodput of the default policy."""
        lines, measured = [], 0
        for column in self.columns(extent):
            ours = self._found(results, extent, column, DEFAULT_POLICY)
            others = {
                policy: self._found(results, extent, column, policy)
                for policy in (*OURS, *RIVALS)
                if policy != DEFAULT_POLICY
            }
            for window, rate in ours.items():
                measured += 1
                ahead = sorted(
                    ((-of[window], policy) for policy, of in others.items() if of.get(window, -1.0) >= rate),
                )
                if ahead:
                    shown = ", ".join(f"`{policy}` {number(-negative)}" for negative, policy in ahead)
                    lines.append(
                        f"- {_title(column)}, window or seed {window}: {shown}; `{DEFAULT_POLICY}` {number(rate)}\n"
                    )
        if not measured:
            return ""
        if not lines:
            return (
                f"`{DEFAULT_POLICY}` is ahead of every other policy that was measured in the same window or seed, in "
                f"all {measured} of them.\n"
            )
        return (
            f"In {len(lines)} of {measured} measured windows or seeds, `{DEFAULT_POLICY}` is not ahead of every other "
            f"policy. The others with at least its goodput, in requests/s:\n\n{''.join(lines)}"
        )

    def _found(self, results: Results, extent: Extent, column: Column, policy: str) -> _Rates:
        """Return a policy's goodput by window, without the windows that have none."""
        kept = {w: results.figures(self.cell(extent, *column, w, policy)) for w in extent.windows(self.windows)}
        return {w: each["goodput_qps"] for w, each in kept.items() if each and each["goodput_qps"] is not None}

    def _price(self, results: Results, extent: Extent, column: Column, policy: str) -> str:
        """Return TTFT P99.9 and the share of rejected requests at the goodput, in the worst window."""
        kept = [results.figures(self.cell(extent, *column, w, policy)) for w in extent.windows(self.windows)]
        told = [each for each in kept if each and "ttft_p999_s" in each]
        if not told:
            return "-"
        refused = max(each["refused_share"] for each in told)
        return f"{max(each['ttft_p999_s'] for each in told):.0f}; {100 * refused:.2f}"


def _title(column: Column) -> str:
    workload, model = column
    return f"{TITLES[workload]} {model}"


def _shares(rates: _Rates, of: _Rates) -> list[float]:
    return [rates[window] / of[window] for window in rates if of.get(window)]
