"""The lengths of hash keys (DualMap paper, appendix A.1.1, Fig. 6), and the prompts' shared prefixes (A.4, Fig. 14).

Core's hotness tree replays the arrivals, without the rest of the router. In the published rule, a prefix is hot if it
starts at least 2/n of the requests, for n members. The default policy has its own rule.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from bench.paper.cells import Cell, Figures
from bench.paper.charts import colour, finish, grid, legend, save
from bench.paper.claims import Claim
from bench.paper.results import Results
from bench.paper.section import Section
from bench.paper.settings import TITLES, TOOL_AGENT, WARMUP, Extent
from bench.paper.tables import number, table

from dualmap.keys.hotness import HotnessTree
from dualmap.policies.registry import POLICIES
from dualmap.pools.pool import Prefix
from dualmap_sim.arrivals import arrivals
from dualmap_sim.experiment import load_workload
from dualmap_sim.presets import PRESETS
from dualmap_sim.workloads.statistics import ideal_block_hit_rate, prefix_share, share_reusing

_MODEL: Final = "7b"
_RATES: Final[Mapping[str, float]] = {"conversation": 3.0, TOOL_AGENT: 8.0}
_RULES: Final = ("dualmap_paper", "dualmap")
_LONGEST_SHOWN: Final = 16


def key_lengths(extent: Extent, workload: str, policy: str, instances: int = 8) -> Figures:
    """Return the number of counted requests by key length in blocks, and the number of keys."""
    trace = (
        load_workload(extent.workload(workload, 0)).capped(PRESETS[_MODEL].input_tokens_max).at_rate(_RATES[workload])
    )
    rule, prefix = POLICIES[policy].hotness, Prefix()
    assert rule is not None, f"{policy} has keys of one length"
    tree = HotnessTree(initial_blocks=prefix.initial_blocks, max_blocks=prefix.max_blocks, window_s=prefix.window_s)
    lengths, keys, busiest = Counter[int](), set[int](), Counter[int]()
    replayed = arrivals(trace, router_block_tokens=trace.block_tokens, engine_block_tokens=trace.block_tokens)
    for number_, arrival in enumerate(replayed):
        hashes = arrival.chain.hashes
        blocks = tree.key_blocks(
            arrival.at_s, hashes, split_share=rule.split / instances, merge_share=rule.merge / instances
        )
        if number_ >= WARMUP:
            lengths[blocks] += 1
            keys.add(hashes[blocks - 1])
            busiest[hashes[blocks - 1]] += 1
    counted = len(replayed) - WARMUP
    return {
        "requests": counted,
        "lengths": {str(length): lengths[length] for length in sorted(lengths)},
        "keys": len(keys),
        "busiest_share": max(busiest.values()) / counted,
    }


def shared_prefixes(extent: Extent, workload: str) -> Figures:
    """Return how much of a workload's prompts earlier prompts share, and the frequencies of its hottest prefixes."""
    trace = load_workload(extent.workload(workload, 0))
    return {
        "requests": len(trace.requests),
        "input_tokens_mean": sum(each.input_tokens for each in trace.requests) / len(trace.requests),
        "output_tokens_mean": sum(each.output_tokens for each in trace.requests) / len(trace.requests),
        "share_half": share_reusing(trace, 0.5),
        "ideal_hit_rate": ideal_block_hit_rate(trace),
        "hottest_shares": [prefix_share(trace, blocks=2, rank=rank) for rank in range(3)],
    }


def _lengths(extent: Extent, workload: str, policy: str) -> Cell:
    return Cell(
        section="keys",
        name=f"{workload} key lengths {policy}",
        policy=policy,
        measure=partial(key_lengths, extent, workload, policy),
    )


def _shared(extent: Extent, workload: str) -> Cell:
    return Cell(
        section="keys",
        name=f"{workload} shared prefixes",
        policy="workload",
        measure=partial(shared_prefixes, extent, workload),
    )


def _cells(extent: Extent) -> Sequence[Cell]:
    lengths = [_lengths(extent, workload, policy) for policy in _RULES for workload in extent.workloads]
    return [*(_shared(extent, workload) for workload in extent.workloads), *lengths]


def _page(results: Results, extent: Extent, plots: Path) -> str:
    rows, lengths = [], {}
    for workload in extent.workloads:
        for policy in _RULES:
            figures = results.figures(_lengths(extent, workload, policy))
            if figures is None:
                continue
            shares = {int(length): of / figures["requests"] for length, of in figures["lengths"].items()}
            lengths[workload, policy] = shares
            common = sorted(shares.items(), key=lambda each: -each[1])[:4]
            rows.append(
                [
                    f"{TITLES[workload]}, rule of {policy}",
                    "; ".join(f"{length}: {share:.1%}" for length, share in common),
                    f"{max(shares)}",
                    f"{figures['keys']:,}",
                    f"{figures['busiest_share']:.1%}",
                ]
            )
    text = table(("workload", "blocks: share of requests", "longest", "keys", "busiest key"), rows)
    facts = []
    for workload in extent.workloads:
        figures = results.figures(_shared(extent, workload))
        if figures is not None:
            facts.append(
                [
                    TITLES[workload],
                    f"{figures['requests']:,}",
                    number(figures["input_tokens_mean"], 0),
                    number(figures["output_tokens_mean"], 0),
                    f"{figures['ideal_hit_rate']:.1%}",
                    f"{figures['share_half']:.1%}",
                    ", ".join(f"{each:.1%}" for each in figures["hottest_shares"]),
                ]
            )
    heads = (
        "workload",
        "requests",
        "input tokens",
        "output",
        "ideal hit rate",
        "share half their prompt",
        "hottest 2-block prefixes",
    )
    text += "\n" + table(heads, facts)
    figure, axes = grid(1, max(2, len(extent.workloads)))
    for place, workload in zip(axes[0], extent.workloads, strict=False):
        for offset, policy in ((-0.2, _RULES[0]), (0.2, _RULES[1])):
            shares = lengths.get((workload, policy), {})
            shown = range(1, _LONGEST_SHOWN + 1)
            place.bar(
                [length + offset for length in shown],
                [
                    100 * sum(s for n, s in shares.items() if n == length or n > length == _LONGEST_SHOWN)
                    for length in shown
                ],
                0.38,
                color=colour(policy),
            )
        finish(place, f"{TITLES[workload]}: requests, %", across=f"blocks in the key ({_LONGEST_SHOWN}: or more)")
    for place in axes[0][len(extent.workloads) :]:
        place.set_visible(False)
    legend(figure, _RULES)
    save(figure, plots / "keys.png")
    return f"{text}\n![key lengths](keys.png)\n"


def _claims(results: Results, extent: Extent) -> Sequence[Claim]:
    says = {
        "conversation": ("95 % of requests have keys of 2 blocks", "48 %", "12,035 / 343 tokens, 40 %"),
        TOOL_AGENT: ("45.2 % of requests 2 blocks, 14.9 % 6, 37.8 % 13", "76 %", "8,596 / 182 tokens, 59 %"),
    }
    claims = []
    for workload in extent.workloads:
        lengths, half, facts = says[workload]
        shown = []
        for policy in _RULES:
            figures = results.figures(_lengths(extent, workload, policy))
            if figures is not None:
                common = Counter[str](figures["lengths"]).most_common(3)
                shares = ", ".join(f"{blocks}: {100 * of / figures['requests']:.1f} %" for blocks, of in common)
                shown.append(f"rule of `{policy}`: {shares}")
        claims.append(Claim("A.1.1, Fig. 6", f"{TITLES[workload]}: {lengths}", "; ".join(shown)))
        shared = results.figures(_shared(extent, workload))
        if shared is not None:
            sizes = f"{shared['input_tokens_mean']:,.0f} / {shared['output_tokens_mean']:,.0f} tokens"
            produced = f"{sizes}, {100 * shared['ideal_hit_rate']:.0f} %"
            title = TITLES[workload]
            claims.append(Claim("Table 1", f"{title}: input / output {facts} reusable", f"{produced} (before the cap)"))
            share = f"{100 * shared['share_half']:.1f} %"
            claims.append(Claim("A.4, Fig. 14", f"{title}: {half} share half of their prompt or more", share))
    return claims


SECTION: Final = Section(
    name="keys",
    title="Key lengths and shared prefixes (Figures 6, 14, Table 1)",
    cells=_cells,
    page=_page,
    claims=_claims,
)
