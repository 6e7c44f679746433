"""Formats the results: tables for stdout and a description of the workload for stderr."""

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from dualmap_cli.simulate.as_it_was import AsItWas
from dualmap_cli.simulate.comparison import WindowShares
from dualmap_cli.simulate.plan import Plan
from dualmap_cli.simulate.pool_option import ignored_fields
from dualmap_cli.simulate.runs import Found, Run, rates
from dualmap_cli.simulate.values import count_text, window_text
from dualmap_sim.events import PoolChange
from dualmap_sim.experiment import Experiment, load_trace, load_workload
from dualmap_sim.goodput import Goodput
from dualmap_sim.workloads.statistics import fact_lines, ideal_cached_tokens
from dualmap_sim.workloads.trace import Trace

_WIDTH: Final = 200
"""Width of the output, larger than every table, so that no table is cut at the terminal's width."""
_SHARES: Final = ("within SLO", "hit rate", "stale", "CV", "refused")
_CUT_SHARE: Final = 0.05
"""If more than this share of the prompts is cut, the replayed workload differs from the trace."""
_SHORT_SLOS: Final = 10
"""A window shorter than this many SLOs ends before an overload becomes visible."""
LEGEND: Final = (
    "Times are seconds and cover served requests after the warm-up; rejected requests count as outside the SLO.\n"
    "Stale: requests of which the engine had cached nothing, of those that the router expected to be cached in part.\n"
    "CV: imbalance of pending prefill tokens between instances (standard deviation / mean; 0 is even).\n"
    "The CV is high by nature when few requests run on idle instances."
)
"""The explanation after the table of runs."""
GOODPUT_LEGEND: Final = (
    "Goodput is the mean over the windows, in requests/s of all instances. For capacity planning use the lowest."
)
"""The explanation after the table of goodputs."""


def announcement(plan: Plan) -> str:
    """Return a description of the workload, with target and actual figures for a generated workload."""
    base = plan.base
    trace = load_trace(base)
    counted = range(base.warmup, len(trace.requests))
    input_tokens = sum(trace.requests[number].input_tokens for number in counted)
    output_tokens = sum(trace.requests[number].output_tokens for number in counted)
    cached_tokens = ideal_cached_tokens(trace)
    whole = load_workload(base.workload)
    told = "named to the router" if base.sessions else "not named to the router (see --sessions)"
    source = base.workload.trace or base.workload.recording or f"{base.workload.name} (seed {base.workload.seed})"
    windows = f", the first of {len(plan.windows)} windows" if len(plan.windows) > 1 else ""
    return (
        f"workload {source} from request {base.workload.start} on{windows}: {len(trace.requests):,} requests, the "
        f"first {base.warmup:,} of them for the warm-up;\n"
        f"the others' prompts (cut to {base.engine.input_tokens_max:,} tokens) have "
        f"{input_tokens / len(counted):,.0f} tokens and their answers "
        f"{output_tokens / len(counted):,.0f} on average, with "
        f"{sum(cached_tokens[number] for number in counted) / input_tokens:.1%} of the prompt tokens reusable at "
        f"best;\nsessions are {told}\n"
        + _pool(plan)
        + _routers(base)
        + _cut(whole, base.engine.input_tokens_max)
        + "\n".join(fact_lines(base.workload.facts(whole)))
    )


def _pool(plan: Plan) -> str:
    """Return the pool of ``--pool``, and its fields without effect; empty without a pool."""
    if plan.pool is None:
        return ""
    ignored = ", ".join(ignored_fields(plan.base, plan.pool))
    without = f"; without effect here: {ignored}" if ignored else ""
    changing = ", at most, as members joined and left" if plan.repeats_members and _members_change(plan) else ""
    return f"settings of pool {plan.pool.id}, {count_text(plan.base.instances, 'instance')}{changing}{without}\n"


def _members_change(plan: Plan) -> bool:
    assert plan.traffic is not None
    return len({tuple(member.id for member in version.pool.members) for version in plan.traffic.versions}) > 1


def _routers(experiment: Experiment) -> str:
    """Return the number of routers, and which of them decides; empty for one router."""
    if experiment.routers == 1:
        return ""
    if experiment.owner_decides:
        mode = f"the pool's owner decides for all (owner), and a message takes {1000 * experiment.hop_delay_s:g} ms"
    else:
        mode = f"each decides by itself (local), with data {1000 * experiment.view_delay_s:g} ms old about the others"
    return f"{experiment.routers} routers: {mode}\n"


def _cut(whole: Trace, cap: int) -> str:
    """Return the number of cut prompts and tokens, as a warning if many are cut; empty if none are cut."""
    longer = whole.longer_than(cap)
    if not longer:
        return ""
    asked = sum(request.input_tokens for request in whole.requests)
    lost = sum(max(0, request.input_tokens - cap) for request in whole.requests)
    much = longer > _CUT_SHARE * len(whole.requests)
    return (
        f"{'warning: ' if much else ''}{longer:,} of the prompts ({longer / len(whole.requests):.1%}) are longer than "
        f"the model's {cap:,} tokens and cut to them, which leaves out {lost / asked:.1%} of all prompt tokens"
        f"{'; --set cap=... moves the cap' if much else ''}\n"
    )


def runs_table(runs: Sequence[Run]) -> Table:
    """Return a table of runs, one row each."""
    table = _table(
        *("policy", "req/s", "TTFT p50", "p90", "p99", "E2E p50", "p90", "within SLO", "hit rate", "stale", "CV"),
        "refused",
    )
    for run in runs:
        figures = run.summary
        table.add_row(
            run.experiment.policy,
            f"{run.experiment.requests_per_s:g}",
            *(_seconds(each) for each in (figures.ttft_p50_s, figures.ttft_p90_s, figures.ttft_p99_s)),
            *(_seconds(each) for each in (figures.e2e_p50_s, figures.e2e_p90_s)),
            f"{figures.slo_attainment:.1%}",
            "-" if math.isnan(figures.hit_rate) else f"{figures.hit_rate:.1%}",
            "-" if math.isnan(figures.stale_rate) else f"{figures.stale_rate:.1%}",
            "-" if math.isnan(figures.pending_cv) else f"{figures.pending_cv:.2f}",
            f"{figures.refused:,}",
        )
    return table


def as_it_was_table(was: AsItWas) -> Table:
    """Return a recording's figures beside those of its simulation."""
    policies, instances = _as_it_was(was.experiment)
    table = _table(f"{policies}, {instances}", "measured", "simulated")
    for name, figure in (("TTFT p50", was.ttft_p50_s), ("TTFT p90", was.ttft_p90_s)):
        table.add_row(name, _seconds(figure.measured), _seconds(figure.simulated))
    for name, figure in (("hit rate", was.hit_rate), ("within SLO", was.slo_attainment)):
        table.add_row(
            name, *(("-" if math.isnan(each) else f"{each:.1%}") for each in (figure.measured, figure.simulated))
        )
    return table


def _as_it_was(experiment: Experiment) -> tuple[str, str]:
    """Return the policies and the numbers of instances of a run, which may change."""
    if experiment.members is None:
        return experiment.policy, count_text(experiment.instances, "instance")
    pools = [event.pool for event in experiment.events if isinstance(event, PoolChange)]
    policies = dict.fromkeys([experiment.policy, *(pool.routing.policy for pool in pools)])
    counts = sorted({len(experiment.members), *(len(pool.members) for pool in pools)})
    several = f"{counts[0]} to " if len(counts) > 1 else ""
    return " then ".join(policies), f"{several}{count_text(counts[-1], 'instance')}"


def windows_table(windows: WindowShares) -> Table:
    """Return the share within the SLO by windows of time, measured and simulated."""
    table = _table(f"windows ({window_text(windows.window_s)})", "requests", "measured", "simulated", "")
    for each in windows.shares:
        both = each.slo_attainment
        table.add_row(
            f"from {each.start_s:,.0f} s on",
            f"{each.requests:,}",
            f"{both.measured:.1%}",
            f"{both.simulated:.1%}",
            "differs" if each.differs else "",
        )
    return table


def losses_table(runs: Sequence[Run], was: AsItWas | None) -> Table:
    """Return what runs with notices lost, beside the simulation of the recording as it was."""
    table = _table("with the notices", "req/s", "failed", "of these cut", "recomputed tokens")
    rows = [(run.experiment.policy, run.experiment, run.losses) for run in runs]
    if was is not None:
        rows.insert(0, ("as it was, simulated", was.experiment, was.losses))
    for name, experiment, lost in rows:
        if lost is not None:
            table.add_row(
                name,
                f"{experiment.requests_per_s:g}",
                f"{lost.failed:,}",
                f"{lost.cut:,}",
                f"{lost.recomputed_tokens:,}",
            )
    return table


def goodputs_table(found: Found) -> Table:
    """Return a table of each policy's goodput: mean, lowest and highest window, and share of the best policy's mean."""
    table = _table("policy", "goodput req/s", "lowest", "highest", "of the best", "windows", "runs")
    best = max((fmean(own) for _, answers in found if (own := rates(answers)) is not None), default=0.0)
    for policy, answers in found:
        own = rates(answers)
        if own is None:
            table.add_row(policy, "never overloaded", "-", "-", "-", f"{len(answers)}", "-")
            continue
        mean = fmean(own)
        table.add_row(
            policy,
            f"{mean:.2f}",
            f"{min(own):.2f}",
            f"{max(own):.2f}",
            f"{mean / best:.1%}" if best else "-",
            f"{len(answers)}",
            f"{sum(each.runs for each in answers if isinstance(each, Goodput))}",
        )
    return table


def short_windows(plan: Plan, found: Found) -> list[str]:
    """Return a warning for each policy with a window that is too short at its goodput."""
    counts = [len(load_trace(replace(plan.base, workload=window)).requests) for window in plan.windows]
    least_s = _SHORT_SLOS * plan.base.slo_ttft_s
    lines = []
    for policy, answers in found:
        durations_s = [
            requests / each.requests_per_s
            for requests, each in zip(counts, answers, strict=True)
            if isinstance(each, Goodput) and each.requests_per_s
        ]
        if durations_s and min(durations_s) < least_s:
            lines.append(
                f"{policy}: at the rate found a window lasts {min(durations_s):.1f} s, less than {_SHORT_SLOS} times "
                "the SLO; that is too short for queues to form and for a reliable figure: give more --requests"
            )
    return lines


def show(table: Table) -> None:
    """Print a table on stdout."""
    Console(file=sys.stdout, width=_WIDTH, highlight=False).print(table)


def _table(first: str, *others: str) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column(first, no_wrap=True)
    for each in others:
        table.add_column(each, justify="right", no_wrap=True)
    return table


def _seconds(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2f}"
