"""Counts the runs in which another policy is ahead of the default policy: a table of docs/evaluation.md."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from bench.paper.cells import Figures
from bench.paper.results import Results
from bench.paper.sections import decode, llumnix, ttft
from bench.paper.sections.tpot import tpot_runs
from bench.paper.settings import DEFAULT_POLICY, OURS, RIVALS, Extent
from bench.paper.tables import table

_OTHERS: Final = tuple(policy for policy in (*RIVALS, *OURS) if policy != DEFAULT_POLICY)
_ATTAINMENT: Final = "slo_attainment"
_TTFT: Final = (_ATTAINMENT, "ttft_mean_s", "ttft_p50_s", "ttft_p90_s")
_E2E: Final = ("e2e_p50_s", "e2e_p90_s")
_TPOT: Final = ("tpot_mean_s", "tpot_p99_s")
_TITLES: Final[Mapping[str, str]] = {
    _ATTAINMENT: "within the SLO",
    "ttft_mean_s": "TTFT mean",
    "ttft_p50_s": "TTFT p50",
    "ttft_p90_s": "TTFT p90",
    "ttft_p99_s": "TTFT p99",
    "e2e_p50_s": "E2E p50",
    "e2e_p90_s": "E2E p90",
    "tpot_mean_s": "TPOT mean",
    "tpot_p99_s": "TPOT p99",
}

Runs = Mapping[str, Mapping[str, Figures]]
"""The figures of runs, by the title of the run and by policy."""


@dataclass(frozen=True, slots=True, order=True)
class _Lead:
    """How far the best other policy is ahead in one run: ``by`` is a share of our value, or of all requests."""

    by: float
    policy: str
    run: str
    ours: float
    other: float


def behind_table(results: Results, extent: Extent) -> str:
    """Return a table of figures in which another policy is ahead of the default policy in at least one run.

    It covers the runs at fixed rates in the sections ``ttft``, ``llumnix`` and ``decode``.
    """
    compared = (
        ("ttft", ttft.runs(results, extent), (*_TTFT, "ttft_p99_s", *_E2E)),
        ("llumnix", llumnix.runs(results, extent), _TTFT),
        ("decode: KV memory", decode.memory_runs(results, extent), (_ATTAINMENT,)),
        ("decode: one small instance", decode.stall_runs(results, extent), (_ATTAINMENT,)),
        ("decode: TPOT", tpot_runs(results, extent), (*_E2E, *_TPOT)),
    )
    rows = [row for section, runs, names in compared for name in names for row in _rows(section, runs, name)]
    heads = ("section", "figure", "runs behind", "most often ahead (runs)", "largest difference")
    return table(heads, rows)


def _rows(section: str, runs: Runs, name: str) -> Iterable[list[str]]:
    """Return the row of one figure, or no row if the default policy is ahead or equal in all runs."""
    compared = [lead for run, found in runs.items() if (lead := _lead(run, found, name)) is not None]
    leads = [lead for lead in compared if lead.by > 0]
    if not leads:
        return
    policy, number = Counter(lead.policy for lead in leads).most_common(1)[0]
    largest = max(leads)
    if name == _ATTAINMENT:
        shown = f"{100 * largest.by:.1f} points: {100 * largest.ours:.1f} and {100 * largest.other:.1f} %"
    else:
        shown = f"{100 * largest.by:.0f} %: {largest.ours:.3f} and {largest.other:.3f} s"
    yield [
        section,
        _TITLES[name],
        f"{len(leads)} of {len(compared)}",
        f"`{policy}` ({number})",
        f"{shown} with `{largest.policy}` ({largest.run})",
    ]


def _lead(run: str, found: Mapping[str, Figures], name: str) -> _Lead | None:
    """Return the lead of the best other policy, at most 0 if it is not ahead, or None without two values."""
    ours = found.get(DEFAULT_POLICY, {}).get(name)
    others = {each: found[each][name] for each in _OTHERS if each in found and found[each].get(name) is not None}
    if ours is None or not others:
        return None
    if name == _ATTAINMENT:
        policy = max(others, key=others.__getitem__)
        return _Lead(others[policy] - ours, policy, run, ours, others[policy])
    policy = min(others, key=others.__getitem__)
    return _Lead(ours / others[policy] - 1, policy, run, ours, others[policy])
