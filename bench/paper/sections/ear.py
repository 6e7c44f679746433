"""EAR's sensitivity, its two pillars, static prefill/decode splits, and TPOT (Elastic Affinity Routing, 3.2 and 5).

EAR's draft leaves most of these figures open. The closed loop of agents is that of the section ``sessions``. T_hot is
given in seconds of pending prefill. Without affinity, every turn goes to the instance with the least pending prefill;
with migration, the session's KV moves there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from types import MappingProxyType
from typing import Final

from bench.paper.agents import BEYOND, COOL_S, EARLY_S, INSTANCES, Run, agents, interference
from bench.paper.cells import Cell, Figures
from bench.paper.charts import draw_lines, finish, grid, legend, save
from bench.paper.claims import Claim
from bench.paper.results import Results
from bench.paper.section import Section
from bench.paper.settings import Extent
from bench.paper.tables import Spread, number, table

_RATES: Final = (2.5, 3.5, BEYOND)
_HIGH: Final = _RATES[1]
_OVERLOAD: Final = 8.0
"""A nominal rate at which instances are hot most of the time."""
_SLO_S: Final = 5.0
_HOT_S: Final = (0.1, 0.25, EARLY_S, 1.0, 2.0, _SLO_S, inf)
_COOLS_S: Final = (0.0, 3.0, 10.0, COOL_S, 100.0)
_ZIPFS: Final = (0.0, 0.4, 0.8, 1.2)
_MEMORIES: Final = (150_000, 250_000, 500_000, 1_000_000)
_INTERFERENCE: Final[Mapping[str, int | None]] = MappingProxyType({"whole prompts": None, "steps of 2048": 2048})


def _cell(extent: Extent, run: Run, window: int) -> Cell:
    return Cell(
        section="ear",
        name=f"{run.name} window {window}",
        policy=run.policy,
        measure=partial(agents, run, 1200 if extent.quick else 4000, window),
    )


def _interference_cell(mode: str) -> Cell:
    return Cell(
        section="ear",
        name=f"interference {mode}",
        policy="engine",
        measure=partial(interference, _INTERFERENCE[mode]),
    )


_HOT: Final = tuple(Run(hot_s=hot_s, rate=rate) for rate in (BEYOND, _OVERLOAD) for hot_s in _HOT_S)
_COOL: Final = tuple(Run(cool_s=cool_s, rate=_OVERLOAD) for cool_s in _COOLS_S)
_PILLARS: Final[Mapping[str, Run]] = MappingProxyType(
    {
        "neither": Run(policy="least_loaded", moves=False),
        "migration only": Run(policy="least_loaded"),
        "affinity only": Run(hot_s=inf),
        f"both, T_hot {EARLY_S:g} s": Run(),
        f"both, T_hot {_SLO_S:g} s": Run(hot_s=_SLO_S),
        "dualmap": Run(policy="dualmap", moves=False),
    }
)
_SKEW: Final[Mapping[str, Run]] = MappingProxyType(
    {
        "least_loaded": Run(policy="least_loaded", moves=False, rate=_HIGH),
        "cache_affinity (sticky)": Run(policy="cache_affinity", moves=False, rate=_HIGH),
        "EAR, affinity only": Run(hot_s=inf, rate=_HIGH),
        f"EAR, T_hot {EARLY_S:g} s": Run(rate=_HIGH),
        "dualmap": Run(policy="dualmap", moves=False, rate=_HIGH),
    }
)
_SPLITS: Final[Mapping[str, Run]] = MappingProxyType(
    {
        "round_robin": Run(policy="round_robin", moves=False),
        "least_loaded": Run(policy="least_loaded", moves=False),
        "cache_affinity": Run(policy="cache_affinity", moves=False),
        "ear": Run(policy="ear", moves=False),
        "dualmap": Run(policy="dualmap", moves=False),
        "7P+1D, ear": Run(policy="ear", moves=False, decoders=1),
        "6P+2D, ear": Run(policy="ear", moves=False, decoders=2),
        "4P+4D, ear": Run(policy="ear", moves=False, decoders=4),
        "6P+2D, dualmap": Run(policy="dualmap", moves=False, decoders=2),
        "4P+4D, dualmap": Run(policy="dualmap", moves=False, decoders=4),
    }
)
_BY_MEMORY: Final = ("least_loaded", "ear", "dualmap", "6P+2D, ear", "4P+4D, ear")


def _runs() -> list[Run]:
    """Return all runs, each once."""
    runs = [*_HOT, *_COOL]
    runs += [replace(run, rate=rate) for run in _PILLARS.values() for rate in (BEYOND, _OVERLOAD)]
    runs += [replace(run, zipf=zipf) for run in _SKEW.values() for zipf in (*_ZIPFS, None)]
    runs += [replace(run, rate=rate) for run in _SPLITS.values() for rate in _RATES]
    runs += [replace(_SPLITS[name], rate=_HIGH, memory=memory) for name in _BY_MEMORY for memory in _MEMORIES]
    return list(dict.fromkeys(runs))


def _cells(extent: Extent) -> Sequence[Cell]:
    cells = [_cell(extent, run, window) for run in _runs() for window in extent.windows()]
    return [*cells, *(_interference_cell(mode) for mode in _INTERFERENCE)]


def _kept(results: Results, extent: Extent, run: Run) -> list[Figures]:
    cells = [_cell(extent, run, window) for window in extent.windows()]
    return [figures for cell in cells if (figures := results.figures(cell)) is not None]


_COLUMNS: Final = (
    ("amplification", "amplification", 2, 1.0),
    ("turn_mean_s", "turn, mean s", 1, 1.0),
    ("ttft_p50_s", "TTFT p50 s", 2, 1.0),
    ("ttft_p90_s", "p90", 2, 1.0),
    ("ttft_p99_s", "p99", 2, 1.0),
    ("tpot_p50_s", "TPOT p50 ms", 0, 1000.0),
    ("tpot_p90_s", "p90", 0, 1000.0),
    ("hit_rate", "hit rate %", 1, 100.0),
    ("pulled_share", "pulled %", 1, 100.0),
    ("moved_share", "turns that moved %", 2, 100.0),
    ("slo_attainment", "within SLO %", 1, 100.0),
    ("served_per_s", "served/s", 2, 1.0),
    ("busiest_ratio", "busiest instance's computed tokens, times the mean", 2, 1.0),
    ("worker_max_p90_s", "worst instance's TTFT p90 s", 2, 1.0),
)
_SPLIT_COLUMNS: Final = (
    ("decode_memory_share", "decode side's memory in use %", 0, 100.0),
    ("decode_wait_p50_s", "prefill's end to first token, p50 s", 2, 1.0),
    ("refused", "rejected", 0, 1.0),
)


def _page(results: Results, extent: Extent, plots: Path) -> str:
    return "".join(
        (
            f"Closed loop of agents, {INSTANCES} instances. If not stated: {BEYOND:g}/s, T_hot {EARLY_S:g} s of "
            f"prefill, T_cool {COOL_S:g} s.\n\n![sensitivity](ear.png)\n\n",
            _part(results, extent, "T_hot", "T_hot s", [(f"{each.hot_s:g} at {each.rate:g}/s", each) for each in _HOT]),
            _part(
                results,
                extent,
                f"T_cool, at {_OVERLOAD:g}/s",
                "T_cool s",
                [(f"{each.cool_s:g}", each) for each in _COOL],
            ),
            _part(
                results,
                extent,
                "The two pillars",
                "pillars",
                [
                    (f"{name}, at {rate:g}/s", replace(run, rate=rate))
                    for rate in (BEYOND, _OVERLOAD)
                    for name, run in _PILLARS.items()
                ],
            ),
            _part(
                results,
                extent,
                f"Skew of the sessions, at {_HIGH:g}/s",
                "Zipf's exponent",
                [
                    (f"{'published shares' if zipf is None else f'{zipf:g}'}: {name}", replace(run, zipf=zipf))
                    for zipf in (*_ZIPFS, None)
                    for name, run in _SKEW.items()
                ],
            ),
            _part(
                results,
                extent,
                "Static prefill/decode splits, and TPOT",
                "policy",
                [
                    (f"{name}, at {rate:g}/s", replace(run, rate=rate))
                    for rate in _RATES
                    for name, run in _SPLITS.items()
                ],
                more=_SPLIT_COLUMNS,
            ),
            _part(
                results,
                extent,
                f"KV memory of an instance, at {_HIGH:g}/s",
                "tokens",
                [
                    (f"{memory:,}: {name}", replace(_SPLITS[name], rate=_HIGH, memory=memory))
                    for memory in _MEMORIES
                    for name in _BY_MEMORY
                ],
                more=_SPLIT_COLUMNS,
            ),
            _interference_text(results),
            _drawn(results, extent, plots),
        )
    )


def _part(
    results: Results,
    extent: Extent,
    title: str,
    head: str,
    runs: Sequence[tuple[str, Run]],
    *,
    more: Sequence[tuple[str, str, int, float]] = (),
) -> str:
    columns = (*_COLUMNS, *more)
    rows = []
    for name, run in runs:
        kept = _kept(results, extent, run)
        if kept:
            shown = (Spread.of(each.get(key) for each in kept).show(digits, scale) for key, _, digits, scale in columns)
            rows.append([name, *shown])
    return f"## {title}\n\n{table((head, *(each for _, each, *_ in columns)), rows)}\n"


def _interference_text(results: Results) -> str:
    rows = [
        [mode, number(each["alone_s"], 0, 1000), number(each["beside_s"], 0, 1000), f"{_times(each):.0f}"]
        for mode in _INTERFERENCE
        if (each := results.figures(_interference_cell(mode))) is not None
    ]
    heads = ("prefill", "token of a decode alone, ms", "beside a prefill of 8192 tokens, ms", "times")
    return f"## Interference of prefill and decode\n\n{table(heads, rows)}\n"


def _times(figures: Figures) -> float:
    return float(figures["beside_s"] / figures["alone_s"])


def _mean(results: Results, extent: Extent, run: Run, name: str) -> float | None:
    return Spread.of(each[name] for each in _kept(results, extent, run)).mean


def _drawn(results: Results, extent: Extent, plots: Path) -> str:
    figure, axes = grid(1, 4)
    for rate, style in ((BEYOND, "-"), (_OVERLOAD, "--")):
        runs = [run for run in _HOT if run.rate == rate and run.hot_s < inf]
        hot = {"ear": [(run.hot_s, _mean(results, extent, run, "ttft_p90_s")) for run in runs]}
        draw_lines(axes[0][0], ("ear",), hot, style=style)
    axes[0][0].set_xscale("log")
    axes[0][0].set_yscale("log")
    finish(axes[0][0], f"TTFT p90, s, at {BEYOND:g}/s, {_OVERLOAD:g}/s (--)", across="T_hot, s of prefill")
    cool = {"ear": [(run.cool_s, _mean(results, extent, run, "ttft_p90_s")) for run in _COOL]}
    draw_lines(axes[0][1], ("ear",), cool)
    finish(axes[0][1], f"TTFT p90, s, at {_OVERLOAD:g}/s", across="T_cool, s")
    names = ("least_loaded", "cache_affinity", "ear", "dualmap")
    chosen = ("least_loaded", "cache_affinity (sticky)", f"EAR, T_hot {EARLY_S:g} s", "dualmap")
    lines = {
        shown: [(zipf, _mean(results, extent, replace(_SKEW[name], zipf=zipf), "worker_max_p90_s")) for zipf in _ZIPFS]
        for shown, name in zip(names, chosen, strict=True)
    }
    draw_lines(axes[0][2], names, lines)
    axes[0][2].set_yscale("log")
    finish(axes[0][2], f"worst instance's TTFT p90, s, at {_HIGH:g}/s", across="skew of sessions, Zipf's exponent")
    for name, style in (("ear", "-"), ("4P+4D, ear", "--"), ("6P+2D, ear", ":")):
        runs = [replace(_SPLITS[name], rate=_HIGH, memory=memory) for memory in _MEMORIES]
        points = [(run.memory / 1000, _mean(results, extent, run, "ttft_p90_s")) for run in runs]
        draw_lines(axes[0][3], ("ear",), {"ear": points}, style=style)
    axes[0][3].set_yscale("log")
    finish(axes[0][3], "TTFT p90, s: ear, 4P+4D (--), 6P+2D (..)", across="KV memory of an instance, 1000 tokens")
    legend(figure, names)
    save(figure, plots / "ear.png")
    return ""


@dataclass(frozen=True, slots=True)
class _Compared:
    """A claim of the source, and the figures of the runs to compare with it; ``unit`` comes before the figures."""

    source: str
    says: str
    unit: str
    runs: Mapping[str, Run]
    figures: tuple[tuple[str, int, float], ...]

    def claim(self, results: Results, extent: Extent) -> Claim:
        """Return the claim beside the figures of the measured runs."""
        parts = []
        for title, run in self.runs.items():
            if _kept(results, extent, run):
                values = (
                    number(_mean(results, extent, run, name), digits, scale) for name, digits, scale in self.figures
                )
                parts.append(f"{title}: {' / '.join(values)}")
        return Claim(self.source, self.says, self.unit + "; ".join(parts) if parts else "")


_TTFT_P50: Final = ("ttft_p50_s", 2, 1.0)
_TTFT_P90: Final = ("ttft_p90_s", 2, 1.0)
_WORST_P90: Final = ("worker_max_p90_s", 2, 1.0)
_MOVED: Final = ("moved_share", 2, 100.0)
_SPLITS_COMPARED: Final = ("ear", "6P+2D, ear", "4P+4D, ear")
_COMPARED: Final = (
    _Compared(
        "EAR 3.2",
        "static prefill/decode splits: TTFT P50 62 to 72 times as high, success falls from 99.5 to 52-68 %",
        "TTFT P50 in s / within SLO in %: ",
        {f"{name} at {rate:g}/s": replace(_SPLITS[name], rate=rate) for rate in _RATES for name in _SPLITS_COMPARED},
        (_TTFT_P50, ("slo_attainment", 1, 100.0)),
    ),
    _Compared(
        "EAR 3.2, 5.5",
        "a static split hits the wall of the decode side's KV memory",
        f"at {_HIGH:g}/s, TTFT P50 / P90 in s by tokens of memory: ",
        {
            f"{memory // 1000}k {name}": replace(_SPLITS[name], rate=_HIGH, memory=memory)
            for memory in _MEMORIES
            for name in _SPLITS_COMPARED
        },
        (_TTFT_P50, _TTFT_P90),
    ),
    _Compared(
        "EAR 5.3",
        "affinity alone has locality, migration alone has none, both are needed (expected, not measured)",
        "hit rate in % / pulled in % / TTFT P90 in s / worst instance's: ",
        {
            f"{name} at {rate:g}/s": replace(run, rate=rate)
            for rate in (BEYOND, _OVERLOAD)
            for name, run in _PILLARS.items()
        },
        (("hit_rate", 1, 100.0), ("pulled_share", 1, 100.0), _TTFT_P90, _WORST_P90),
    ),
    _Compared(
        "EAR 5.5",
        "T_hot: a low threshold thrashes, a high threshold misses hot instances (open)",
        "turns that moved in % / TTFT P90 in s: ",
        {f"{each.hot_s:g} s at {each.rate:g}/s": each for each in _HOT},
        (_MOVED, _TTFT_P90),
    ),
    _Compared(
        "EAR 5.5",
        "T_cool: likewise (open)",
        f"at {_OVERLOAD:g}/s, turns that moved in % / TTFT P90 in s: ",
        {f"{each.cool_s:g} s": each for each in _COOL},
        (_MOVED, _TTFT_P90),
    ),
    _Compared(
        "EAR 5.5",
        "the gap between sticky sessions and EAR grows with the skew of the sessions (open)",
        f"at {_HIGH:g}/s, worst instance's TTFT P90 in s by Zipf's exponent: ",
        {
            f"{zipf:g} {name}": replace(_SKEW[name], zipf=zipf)
            for zipf in (_ZIPFS[0], _ZIPFS[-1])
            for name in ("cache_affinity (sticky)", f"EAR, T_hot {EARLY_S:g} s", "dualmap")
        },
        (_WORST_P90,),
    ),
    _Compared(
        "EAR 1, 5.2",
        "EAR dominates in TPOT, too (open)",
        f"TPOT P50 / P90 in ms, at {BEYOND:g}/s: ",
        {name: _SPLITS[name] for name in ("round_robin", "least_loaded", "cache_affinity", "ear", "dualmap")},
        (("tpot_p50_s", 0, 1000.0), ("tpot_p90_s", 0, 1000.0)),
    ),
)


def _claims(results: Results, extent: Extent) -> Sequence[Claim]:
    interfered = [
        f"{_times(each):.0f} times with {mode}"
        for mode in _INTERFERENCE
        if (each := results.figures(_interference_cell(mode))) is not None
    ]
    alone = Claim(
        "EAR 3.3", "a prefill of 8k tokens on the same GPU makes TPOT 66 times as long", "; ".join(interfered)
    )
    return (*(each.claim(results, extent) for each in _COMPARED), alone)


SECTION: Final = Section(
    name="ear",
    title="EAR: sensitivity, pillars, static prefill/decode splits, TPOT",
    cells=_cells,
    page=_page,
    claims=_claims,
)
