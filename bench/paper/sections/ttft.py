"""Effective request capacity, TTFT and E2E over the rate (DualMap paper, Figs. 3, 4); hit rate, balance (Figs. 1, 10).

The runs cover one window of each workload and model, at five rates. Prefill-only, which the paper does not measure,
has three rates. Fig. 11 shows the balance, too.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from bench.paper.cells import Cell, Figures
from bench.paper.charts import colour, draw_lines, finish, grid, legend, mark_slo, marker, save
from bench.paper.claims import Claim
from bench.paper.measures import run_figures
from bench.paper.results import Results
from bench.paper.section import Section
from bench.paper.settings import (
    CONVERSATION,
    MODELS,
    OURS,
    RATES,
    RIVALS,
    TITLES,
    TOOL_AGENT,
    WARMUP,
    Extent,
    few_rates,
)
from bench.paper.tables import change, number, ratio, table

from dualmap_sim.experiment import load_workload
from dualmap_sim.presets import PRESETS
from dualmap_sim.workloads.statistics import ideal_block_tokens

_POLICIES: Final = ("limit", *RIVALS, *OURS)
_SHOWN: Final = (*OURS, *RIVALS, "limit")
_LATENCIES: Final = ("ttft_p50_s", "ttft_p90_s", "e2e_p50_s", "e2e_p90_s")


def cell(extent: Extent, workload: str, model: str, rate: float, policy: str) -> Cell:
    """Return the cell of one policy at one rate of the curves."""
    return Cell(
        section="ttft",
        name=f"{workload} {model} {rate:g}/s {policy}",
        policy=policy,
        measure=partial(run_figures, extent.experiment(workload, model, 0, policy, rate)),
    )


def _ideal_hit_rate(extent: Extent, workload: str, model: str) -> Figures:
    trace = load_workload(extent.workload(workload, 0)).capped(PRESETS[model].input_tokens_max)
    tokens = sum(each.input_tokens for each in trace.requests[WARMUP:])
    return {"hit_rate": sum(ideal_block_tokens(trace)[WARMUP:]) / tokens}


def _ideal_cell(extent: Extent, workload: str, model: str) -> Cell:
    return Cell(
        section="ttft",
        name=f"{workload} {model} ideal hit rate",
        policy="limit",
        measure=partial(_ideal_hit_rate, extent, workload, model),
    )


def _settings(extent: Extent) -> list[tuple[str, str]]:
    return [(workload, model) for workload in extent.workloads for model in MODELS]


def _cells(extent: Extent) -> Sequence[Cell]:
    runs = [
        cell(extent, workload, model, rate, policy)
        for policy in _POLICIES
        for workload, model in _settings(extent)
        for rate in few_rates(RATES[workload, model], extent)
    ]
    return [*(_ideal_cell(extent, *setting) for setting in _settings(extent)), *runs]


_Found = Mapping[tuple[str, float], Figures]
"""The figures by policy and rate."""


def _found(results: Results, extent: Extent, workload: str, model: str) -> dict[tuple[str, float], Figures]:
    found = {}
    for policy in _POLICIES:
        for rate in few_rates(RATES[workload, model], extent):
            figures = results.figures(cell(extent, workload, model, rate, policy))
            if figures is not None:
                found[policy, rate] = figures
    return found


def runs(results: Results, extent: Extent) -> dict[str, dict[str, Figures]]:
    """Return the figures of all measured runs, by the run's title and the policy."""
    runs: dict[str, dict[str, Figures]] = {}
    for workload, model in _settings(extent):
        for (policy, rate), figures in _found(results, extent, workload, model).items():
            runs.setdefault(f"{TITLES[workload]} {model} at {rate:g}/s", {})[policy] = figures
    return runs


def _page(results: Results, extent: Extent, plots: Path) -> str:
    settings = _settings(extent)
    found = {setting: _found(results, extent, *setting) for setting in settings}
    _draw(found, extent, plots)
    _draw_balance(found, extent, plots)
    parts = ["![TTFT, E2E and attainment over rate](ttft.png)\n\n![hit rate against imbalance](balance.png)\n"]
    for workload, model in settings:
        parts.append(f"## {TITLES[workload]}, {model}\n")
        ideal = results.figures(_ideal_cell(extent, workload, model))
        if ideal is not None:
            parts.append(
                f"Of the counted prompt tokens {ideal['hit_rate']:.1%} could be reused at best (one endless cache).\n"
            )
        parts.append(_tables(found[workload, model], few_rates(RATES[workload, model], extent), ideal))
    return "\n".join(parts)


def _tables(found: _Found, rates: Sequence[float], ideal: Figures | None) -> str:
    heads = (
        "policy",
        "requests/s",
        "within SLO",
        "TTFT p50 s",
        "p90",
        "p99",
        "E2E p50 s",
        "p90",
        "hit rate",
        "of ideal",
        "CV",
    )
    rows = []
    for policy in _SHOWN:
        for rate in rates:
            figures = found.get((policy, rate))
            if figures is None:
                continue
            rows.append(
                [
                    policy,
                    f"{rate:g}",
                    number(figures["slo_attainment"], 1, 100) + " %",
                    *(number(figures[each]) for each in ("ttft_p50_s", "ttft_p90_s", "ttft_p99_s")),
                    *(number(figures[each]) for each in ("e2e_p50_s", "e2e_p90_s")),
                    number(figures["hit_rate"], 1, 100) + " %",
                    ratio(figures["hit_rate"], ideal["hit_rate"] if ideal else None),
                    number(figures["pending_cv"]),
                ]
            )
    return table(heads, rows) + "\n" + _gains(found, rates)


def _gains(found: _Found, rates: Sequence[float]) -> str:
    """Return the differences of our policies from the best other policy for each figure."""
    rows = []
    for policy in OURS:
        for rate in rates:
            ours = found.get((policy, rate))
            others = [found[each, rate] for each in RIVALS if (each, rate) in found]
            if ours is None or not others:
                continue
            best = {
                each: min((other[each] for other in others if other[each] is not None), default=None)
                for each in _LATENCIES
            }
            capacity = max(other["slo_attainment"] for other in others)
            rows.append(
                [
                    policy,
                    f"{rate:g}",
                    change(ours["slo_attainment"], capacity),
                    *(change(ours[each], best[each]) for each in _LATENCIES),
                ]
            )
    heads = ("against the best other policy", "requests/s", "requests within SLO", "TTFT p50", "p90", "E2E p50", "p90")
    return table(heads, rows)


def _draw(found: Mapping[tuple[str, str], _Found], extent: Extent, plots: Path) -> None:
    panels = (
        ("slo_attainment", 100.0, "within the SLO, %"),
        ("ttft_p50_s", 1.0, "TTFT p50, s"),
        ("ttft_p90_s", 1.0, "TTFT p90, s"),
        ("e2e_p50_s", 1.0, "E2E p50, s"),
        ("e2e_p90_s", 1.0, "E2E p90, s"),
    )
    figure, axes = grid(len(found), len(panels))
    for row, ((workload, model), of) in zip(axes, found.items(), strict=True):
        rates = few_rates(RATES[workload, model], extent)
        for place, (figure_name, scale, title) in zip(row, panels, strict=True):
            lines = {
                policy: [
                    (rate, of[policy, rate][figure_name] * scale)
                    for rate in rates
                    if (policy, rate) in of and of[policy, rate][figure_name] is not None
                ]
                for policy in _SHOWN
            }
            draw_lines(place, _SHOWN, lines)
            if figure_name.endswith("_s"):
                place.set_yscale("log")
                place.yaxis.set_major_formatter("{x:g}")
                place.yaxis.set_minor_formatter("{x:g}")
            if figure_name.startswith("ttft"):
                mark_slo(place)
            finish(place, f"{TITLES[workload]}, {model}: {title}", across="requests/s")
    legend(figure, _SHOWN)
    save(figure, plots / "ttft.png")


def _draw_balance(found: Mapping[tuple[str, str], _Found], extent: Extent, plots: Path) -> None:
    shown = [workload for workload in extent.workloads if (workload, "7b") in found]
    figure, axes = grid(1, max(2, len(shown)))
    for place, workload in zip(axes[0], shown, strict=False):
        rates = few_rates(RATES[workload, "7b"], extent)
        rate = rates[len(rates) // 2]
        for policy in _SHOWN:
            figures = found[workload, "7b"].get((policy, rate))
            if figures is None or figures["pending_cv"] is None:
                continue
            place.scatter(
                figures["pending_cv"],
                100 * figures["hit_rate"],
                color=colour(policy),
                marker=marker(_SHOWN, policy),
                s=45,
            )
        finish(
            place, f"{TITLES[workload]}, 7b at {rate:g}/s: hit rate, %", across="CV of pending tokens over instances"
        )
    for place in axes[0][len(shown) :]:
        place.set_visible(False)
    legend(figure, _SHOWN)
    save(figure, plots / "balance.png")


def _claims(results: Results, extent: Extent) -> Sequence[Claim]:
    return [claim for workload in extent.workloads for claim in _workload_claims(results, extent, workload)]


_CLAIMED: Final[Mapping[str, tuple[str, str, str]]] = {
    CONVERSATION: (
        "requests within the SLO +40.6 to +80 % over the best baseline",
        "hit rate of Cache Affinity 1.21 times that of Least Loaded",
        "62.5 %",
    ),
    TOOL_AGENT: (
        "requests within the SLO up to +125 % over the best baseline",
        "hit rate of Cache Affinity near the upper bound, of Least Loaded near the lower one",
        "96.4 %",
    ),
}


_LATENCY_CLAIMS: Final = (
    ("ttft_p50_s", "TTFT P50 -55.4 to -97.4 %"),
    ("ttft_p90_s", "TTFT P90 -82.3 to -97 %"),
    ("e2e_p50_s", "E2E P50 lower (how much is left open)"),
    ("e2e_p90_s", "E2E P90 lower (how much is left open)"),
)
"""The figures that the paper compares at high rates, and what it says about them."""


def _workload_claims(results: Results, extent: Extent, workload: str) -> Sequence[Claim]:
    """Return the claims on one workload: capacity, latency, hit rate and balance. The paper has only 7B and 14B."""
    models = {model: _found(results, extent, workload, model) for model in ("7b", "14b")}
    title = TITLES[workload]
    capacity, affinity, of_ideal = _CLAIMED[workload]
    claims = [Claim("4.2, Fig. 3", f"{title}: {capacity}", _most(models, extent, workload))]
    for name, says in _LATENCY_CLAIMS:
        claims.append(
            Claim(
                "4.2, Fig. 4",
                f"{title}: {says} against the best baseline at high rates",
                _at_high_rates(models, extent, workload, name),
            )
        )
    claims.append(
        Claim(
            "4.2, Fig. 4",
            f"{title}: E2E stays close to its value at low rates when the rate doubles",
            _when_doubled(models, extent, workload),
        )
    )
    rates = few_rates(RATES[workload, "7b"], extent)
    rate, found = rates[len(rates) // 2], models["7b"]
    at = {policy: found[policy, rate] for policy in _SHOWN if (policy, rate) in found}
    ideal = results.figures(_ideal_cell(extent, workload, "7b"))
    if "cache_affinity" not in at or "least_loaded" not in at or ideal is None:
        return claims
    hits = {policy: each["hit_rate"] for policy, each in at.items()}
    shares = {policy: f"{hits[policy] / ideal['hit_rate']:.1%}" for policy in hits}
    claims.append(
        Claim(
            "2.2, Fig. 1",
            f"{title}: {affinity}",
            f"{hits['cache_affinity'] / hits['least_loaded']:.2f} times, {shares['cache_affinity']} and "
            f"{shares['least_loaded']} of the bound (7b at {rate:g}/s)",
        )
    )
    ours = ", ".join(f"`{policy}` {shares[policy]}" for policy in (*OURS, "preble", "min_ttft") if policy in shares)
    claims.append(Claim("A.2.2, Fig. 10", f"{title}: DualMap reaches {of_ideal} of the theoretical hit rate", ours))
    cvs = ", ".join(f"`{policy}` {each['pending_cv']:.2f}" for policy, each in at.items())
    claims.append(Claim("A.2.2, Fig. 11", f"{title}: Least Loaded has CV 0, Cache Affinity is skewed", cvs))
    return claims


def _when_doubled(models: Mapping[str, _Found], extent: Extent, workload: str) -> str:
    """Return the ratio of E2E at the highest rate, up to twice the lowest rate, to E2E at the lowest rate."""
    parts = []
    for model, found in models.items():
        rates = few_rates(RATES[workload, model], extent)
        low = rates[0]
        high = max(rate for rate in rates if rate <= 2 * low)
        for policy in (*OURS, "min_ttft"):
            if (policy, low) not in found or (policy, high) not in found or high == low:
                continue
            ratios = ", ".join(
                f"{found[policy, high][name] / found[policy, low][name]:.1f}" for name in ("e2e_p50_s", "e2e_p90_s")
            )
            parts.append(f"`{policy}` {ratios} times ({model}, {low:g} to {high:g}/s)")
    return f"P50, P90: {'; '.join(parts)}" if parts else ""


def _most(models: Mapping[str, _Found], extent: Extent, workload: str) -> str:
    """Return our largest gain in requests within the SLO over the best other policy, and the rate of this gain."""
    parts = []
    for policy in OURS:
        gains = []
        for model, found in models.items():
            for rate in few_rates(RATES[workload, model], extent):
                others = [found[each, rate]["slo_attainment"] for each in RIVALS if (each, rate) in found]
                if others and (policy, rate) in found:
                    gains.append((found[policy, rate]["slo_attainment"] / max(others) - 1, model, rate))
        if gains:
            gain, model, rate = max(gains)
            parts.append(f"`{policy}` at most {100 * gain:+.1f} % ({model} at {rate:g}/s)")
    return "; ".join(parts)


def _at_high_rates(models: Mapping[str, _Found], extent: Extent, workload: str, name: str) -> str:
    """Return the difference of our latency from the lowest other one at the two highest rates of each model."""
    parts = []
    for policy in OURS:
        changes = []
        for model, found in models.items():
            for rate in few_rates(RATES[workload, model], extent)[-2:]:
                others = [found[each, rate][name] for each in RIVALS if (each, rate) in found]
                if others and (policy, rate) in found:
                    changes.append(100 * (found[policy, rate][name] / min(others) - 1))
        if changes:
            parts.append(f"`{policy}` {min(changes):+.1f} to {max(changes):+.1f} %")
    return "; ".join(parts)


SECTION: Final = Section(
    name="ttft",
    title="Effective request capacity, TTFT, E2E, hit rate and balance (Figures 1, 3, 4, 10, 11)",
    cells=_cells,
    page=_page,
    claims=_claims,
)
