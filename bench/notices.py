"""python -m bench notices: members that must stop within seconds, in virtual time.

Two of eight instances stop after a notice. The routers know nothing, drain the members, or know when they leave. The
rows count the requests that arrive from the notice on, and those in flight at that time. A request fails if its
instance stops before its end. Envoy sends a failed request without a first byte to another instance, and cuts the
others. The client does not repeat a request. With sidecars that continue streams (``dualmap pd-proxy --continue``) and
outlive their engines, another instance generates the rest of the others.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import click

from dualmap_sim.experiment import Experiment, Outcome, pool_of, run_experiment
from dualmap_sim.notices import Notice, Reaction, losses
from dualmap_sim.records import Record
from dualmap_sim.shared_store import StoreConfig
from dualmap_sim.workloads.catalog import Workload

_RATES: Final = {"default": 8.0, "agentic": 3.0}
"""Requests per second of each workload, which eight instances serve within the SLO and six nearly do."""
_NOTICES: Final = (30.0, 120.0)
_LASTS_S: Final = 500.0
_AT_S: Final = 200.0
_LEAVING: Final = frozenset({"qwen-2", "qwen-5"})
_STORE: Final = StoreConfig(tokens_per_s=200_000.0)
_CUT: Final = "of these cut"
_HEADS: Final = (
    *("workload", "notice s", "KV store", "routers know", "failed", _CUT, "continued", "longest stall s"),
    *("recomputed tokens", "stayed", "TTFT p90 s", "within SLO"),
)


@click.command()
@click.option("--quick", is_flag=True, help="One workload without a store.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per run.")
def notices(quick: bool, as_json: bool) -> None:
    """Compare what routers know of notices."""
    if not as_json:
        print(f"| {' | '.join(_HEADS)} |")
        print(f"|{'---|' * len(_HEADS)}")
    for workload in ("default",) if quick else _RATES:
        for store in (None,) if quick else (None, _STORE):
            base = _experiment(workload, store)
            _print(_row(base, None, None), as_json)
            for notice_s in _NOTICES:
                notice = Notice(at_s=_AT_S, notice_s=notice_s, members=_LEAVING)
                for reaction in Reaction:
                    row = _row(base, notice, reaction)
                    _print(row, as_json)
                    if row[_CUT] != "0":
                        _print(_row(replace(base, continues=True), notice, reaction), as_json)


def _experiment(workload: str, store: StoreConfig | None) -> Experiment:
    rate = _RATES[workload]
    return Experiment(
        workload=Workload(name=workload, requests=round(_LASTS_S * rate)),
        requests_per_s=rate,
        store=store,
        sample_s=None,
    )


def _row(base: Experiment, notice: Notice | None, reaction: Reaction | None) -> dict[str, str]:
    events = () if notice is None or reaction is None else notice.events(pool_of(base), reaction)
    outcome = run_experiment(replace(base, events=events))
    lost = losses(outcome.records, from_s=_AT_S, block_tokens=base.engine.block_tokens)
    continued = [each for each in outcome.records if each.continued and not each.failed]
    cells = (
        base.workload.name or "",
        "none" if notice is None else f"{notice.notice_s:g}",
        "none" if base.store is None else f"{base.store.tokens_per_s:,.0f}/s",
        "" if reaction is None else reaction.value,
        str(lost.failed),
        str(lost.cut),
        *_streams(base, continued),
        f"{lost.recomputed_tokens:,}",
        str(sum(each.rule == "leaving-warm" for each in outcome.records)),
        *_latency(outcome, base.slo_ttft_s),
    )
    return dict(zip(_HEADS, cells, strict=True))


def _streams(base: Experiment, continued: Sequence[Record]) -> tuple[str, str]:
    """Return the number of streams that continued, and the longest time for which one of them stalled."""
    if not base.continues:
        return "", ""
    return str(len(continued)), f"{max((each.stall_s for each in continued), default=0.0):.1f}"


def _latency(outcome: Outcome, slo_ttft_s: float) -> tuple[str, str]:
    """Return the 90th percentile of TTFT and the share within the SLO, of the requests since the notice."""
    since = [each for each in outcome.records if each.arrival.at_s >= _AT_S]
    ttfts_s = sorted(each.ttft_s for each in since if each.ttft_s is not None)
    within = sum(each <= slo_ttft_s for each in ttfts_s)
    return f"{ttfts_s[int(0.9 * len(ttfts_s))]:.2f}", f"{100 * within / len(since):.1f} %"


def _print(row: dict[str, str], as_json: bool) -> None:
    print(json.dumps(row) if as_json else f"| {' | '.join(row.values())} |", flush=True)
