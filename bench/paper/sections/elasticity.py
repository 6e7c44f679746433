"""Scaling under load (DualMap paper, A.2.3, Fig. 12), and the share of moved keys (sections 3.4, A.1.3).

The workload is Tool&Agent on 7b. In one run, four instances join four overloaded instances. In the other run, four of
eight instances leave one by one, each after its drain. Attainment covers the requests that arrived within each
``_STEP_S`` seconds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf, nan
from pathlib import Path
from typing import Final

from bench.paper.cells import Cell, Figures
from bench.paper.charts import draw_lines, finish, grid, legend, save
from bench.paper.claims import Claim
from bench.paper.results import Results
from bench.paper.section import Section
from bench.paper.settings import OURS, RIVALS, TOOL_AGENT, Extent, block_tokens
from bench.paper.tables import number, table
from xxhash import xxh3_64_intdigest

from dualmap.keys.rings import DualRing
from dualmap.pools.pool import Member, MemberState, Model, Pool, Prefix, Ring, Routing
from dualmap_sim.arrivals import arrivals
from dualmap_sim.cluster import Cluster, ClusterConfig
from dualmap_sim.events import PoolChange
from dualmap_sim.experiment import load_workload
from dualmap_sim.presets import PRESETS
from dualmap_sim.records import Record

_POLICIES: Final = (*RIVALS, *OURS)
_UP: Final = (4.0, 5.0)
"""The paper's rate, and a rate that overloads four instances of our model as much as the paper's instances."""
_UP_AT_S: Final = 74.0
_DOWN: Final = 2.0
_DOWN_FROM_S: Final = 200.0
_DRAIN_S: Final = 60.0
_SECONDS: Final = 600.0
_STEP_S: Final = 20.0
_RECOVERED_S: Final = 10.0
_SLO_S: Final = 5.0
_ENGINE: Final = PRESETS["7b"]
_KEYS: Final = 20_000
_CHANGES: Final = ((4, 8), (8, 4), (8, 9), (9, 8), (32, 33))


def scaling(extent: Extent, policy: str, rate: float, *, up: bool) -> Figures:
    """Replay a change of the pool's size; return attainment and hit rate over time, and after the change."""
    seconds = _SECONDS / (2 if extent.quick else 1)
    trace = load_workload(extent.workload(TOOL_AGENT, 0)).capped(_ENGINE.input_tokens_max)
    trace = replace(trace, requests=trace.requests[: int(seconds * rate)]).without_sessions()
    replayed = arrivals(
        trace.at_rate(rate), router_block_tokens=block_tokens(policy), engine_block_tokens=_ENGINE.block_tokens
    )
    full = _pool(policy, 8)
    first = _pool(policy, 4) if up else full
    events = (PoolChange(at_s=_UP_AT_S, pool=full),) if up else _shrinking(full)
    records = Cluster(ClusterConfig(pool=first, engine=_ENGINE, events=events, discovery=True)).run(replayed)
    steps = [_step(records, at_s) for at_s in range(0, int(seconds), int(_STEP_S))]
    change_s = _UP_AT_S if up else _DOWN_FROM_S
    return {
        "attainment": [attained for attained, _ in steps],
        "hit_rate": [hits for _, hits in steps],
        "attainment_before": _attainment(_within(records, change_s - _STEP_S, change_s)),
        "attainment_after": _attainment(_within(records, change_s, inf)),
        "recovered_after_s": _recovered_after_s(records, change_s),
        "failed_or_refused": sum(each.failed or each.refused is not None for each in records),
    }


def remapped(before: int, after: int) -> Figures:
    """Return the shares of keys with a new first candidate, with a new pair, and with no member of their old pair."""
    old, new = (DualRing(_members(size), Ring()) for size in (before, after))
    first = pair = both = modulo = 0
    for index in range(_KEYS):
        key = xxh3_64_intdigest(b"key %d" % index)
        was, now = old.pair(key), new.pair(key)
        first += was[0] != now[0]
        pair += set(was) != set(now)
        both += not set(was) & set(now)
        modulo += key % before != key % after
    return {"first": first / _KEYS, "pair": pair / _KEYS, "both": both / _KEYS, "modulo": modulo / _KEYS}


def _members(size: int) -> tuple[Member, ...]:
    return tuple(Member(id=f"qwen-{index}", address=f"10.0.0.{index + 1}", port=8000) for index in range(size))


def _pool(policy: str, size: int) -> Pool:
    """Return a pool with the settings of ``as_shipped``."""
    return Pool(
        namespace="bench",
        name="qwen",
        model=Model(name="qwen"),
        routing=Routing(policy=policy, prefix=Prefix(block_tokens=block_tokens(policy))),
        members=_members(size),
    )


def _shrinking(pool: Pool) -> tuple[PoolChange, ...]:
    """Return the pool changes that drain the last members one by one, and remove each after its drain, down to four."""
    changes, members = [], list(pool.members)
    for place in range(len(members) - 1, 3, -1):
        at_s = _DOWN_FROM_S + _DRAIN_S * (len(pool.members) - 1 - place)
        members[place] = replace(members[place], state=MemberState.DRAINING)
        del members[place + 1 :]
        changes.append(PoolChange(at_s=at_s, pool=replace(pool, members=tuple(members))))
    last_s = changes[-1].at_s + _DRAIN_S
    return (*changes, PoolChange(at_s=last_s, pool=replace(pool, members=tuple(members[:4]))))


def _step(records: Sequence[Record], at_s: float) -> tuple[float, float]:
    within = _within(records, at_s, at_s + _STEP_S)
    tokens = sum(each.arrival.work.prompt_tokens for each in within)
    return _attainment(within), sum(each.cached_tokens for each in within) / tokens if tokens else nan


def _within(records: Sequence[Record], begin_s: float, end_s: float) -> list[Record]:
    return [each for each in records if begin_s <= each.arrival.at_s < end_s]


def _attainment(records: Sequence[Record]) -> float:
    return sum(each.ttft_s is not None and each.ttft_s <= _SLO_S for each in records) / len(records) if records else nan


def _recovered_after_s(records: Sequence[Record], change_s: float) -> float | None:
    """Return the time from the change until the requests of ten seconds attain 90 % again; None if they never do."""
    at_s = change_s
    last_s = records[-1].arrival.at_s
    while at_s < last_s:
        if _attainment(_within(records, at_s, at_s + _RECOVERED_S)) >= 0.9:
            return at_s - change_s
        at_s += 2.0
    return None


def _scaling_cell(extent: Extent, policy: str, rate: float, *, up: bool) -> Cell:
    return Cell(
        section="elasticity",
        name=f"{'4 to 8' if up else '8 to 4'} at {rate:g}/s {policy}",
        policy=policy,
        measure=partial(scaling, extent, policy, rate, up=up),
    )


def _remapped_cell(before: int, after: int) -> Cell:
    return Cell(
        section="elasticity", name=f"keys {before} to {after}", policy="rings", measure=partial(remapped, before, after)
    )


_SCALINGS: Final = (*((rate, True) for rate in _UP), (_DOWN, False))


def _cells(extent: Extent) -> Sequence[Cell]:
    rings = [_remapped_cell(*change) for change in _CHANGES]
    return [*rings, *(_scaling_cell(extent, policy, rate, up=up) for policy in _POLICIES for rate, up in _SCALINGS)]


def _page(results: Results, extent: Extent, plots: Path) -> str:
    rows = []
    lines: dict[tuple[float, bool], dict[str, list[tuple[float, float | None]]]] = {each: {} for each in _SCALINGS}
    for rate, up in _SCALINGS:
        for policy in _POLICIES:
            figures = results.figures(_scaling_cell(extent, policy, rate, up=up))
            if figures is None:
                continue
            attainment = figures["attainment"]
            lines[rate, up][policy] = [
                (place * _STEP_S + _STEP_S / 2, None if share is None else 100 * share)
                for place, share in enumerate(attainment)
            ]
            rows.append(
                [
                    f"{'4 to 8' if up else '8 to 4'} at {rate:g}/s",
                    policy,
                    number(figures["attainment_before"], 1, 100) + " %",
                    number(min(each for each in attainment if each is not None), 1, 100) + " %",
                    number(figures["recovered_after_s"], 0),
                    number(figures["attainment_after"], 1, 100) + " %",
                    f"{figures['failed_or_refused']}",
                ]
            )
    text = table(
        (
            "change",
            "policy",
            "20 s before",
            "worst 20 s",
            "90 % again after s",
            "all after the change",
            "failed or rejected",
        ),
        rows,
    )
    figure, axes = grid(1, len(_SCALINGS))
    for place, (rate, up) in zip(axes[0], _SCALINGS, strict=True):
        draw_lines(place, _POLICIES, lines[rate, up])
        place.axvline(_UP_AT_S if up else _DOWN_FROM_S, color="0.5", linewidth=1, linestyle=":")
        place.set_ylim(-3, 103)
        finish(place, f"{'4 to 8' if up else '8 to 4'} instances at {rate:g}/s: within SLO, %", across="seconds")
    legend(figure, _POLICIES)
    save(figure, plots / "elasticity.png")
    return f"{text}\n![attainment over time](elasticity.png)\n\n{_moved(results)}"


def _moved(results: Results) -> str:
    rows = []
    for before, after in _CHANGES:
        figures = results.figures(_remapped_cell(before, after))
        if figures is not None:
            rows.append(
                [
                    f"{before} to {after}",
                    *(
                        f"{figures[each]:.1%} ({expected:.1%})"
                        for each, expected in expected_to_move(before, after).items()
                    ),
                    f"{figures['modulo']:.1%}",
                ]
            )
    heads = ("instances", "another first candidate", "another pair", "neither of the old pair", "with `hash mod n`")
    return "Share of keys that move; in brackets what theory says of pairs drawn at random.\n\n" + table(heads, rows)


def expected_to_move(before: int, after: int) -> Mapping[str, float]:
    """Return the expected shares of moved keys, for pairs of two distinct members drawn at random.

    A pair stays the same if both members of the pair in the larger pool are also in the smaller pool.
    """
    few, many = sorted((before, after))
    pairs, changed = many * (many - 1), many - few
    return {"first": changed / many, "pair": 1 - few * (few - 1) / pairs, "both": changed * (changed - 1) / pairs}


def _claims(results: Results, extent: Extent) -> Sequence[Claim]:
    up, down = [], []
    for policy in OURS:
        for rate in _UP:
            figures = results.figures(_scaling_cell(extent, policy, rate, up=True))
            if figures is not None:
                before, after = (100 * figures[name] for name in ("attainment_before", "attainment_after"))
                again_s = number(figures["recovered_after_s"], 0)
                up.append(
                    f"`{policy}` at {rate:g}/s: {before:.0f} % before, 90 % again after {again_s} s, then {after:.1f} %"
                )
        figures = results.figures(_scaling_cell(extent, policy, _DOWN, up=False))
        if figures is not None:
            worst = [each for each in figures["attainment"] if each is not None]
            down.append(
                f"`{policy}` {100 * figures['attainment_after']:.1f} % (worst {_STEP_S:g} s: {100 * min(worst):.0f} %)"
            )
    moved = []
    for before, after in _CHANGES:
        figures = results.figures(_remapped_cell(before, after))
        if figures is not None:
            theory = expected_to_move(before, after)
            moved.append(f"{before} to {after}: {100 * figures['first']:.1f} % (theory {100 * theory['first']:.1f} %)")
    return (
        Claim(
            "A.2.3, Fig. 12a", "4 to 8 instances at 4/s after 74 s: attainment promptly rises to 90 %", "; ".join(up)
        ),
        Claim("A.2.3, Fig. 12c", "8 to 4 at 2/s: attainment stays above 90 %", "; ".join(down)),
        Claim(
            "3.4, A.1.3",
            "only the neighbouring arcs move",
            f"keys that move on a ring: {'; '.join(moved)}" if moved else "",
        ),
    )


SECTION: Final = Section(name="elasticity", title="Elasticity (Figure 12)", cells=_cells, page=_page, claims=_claims)
