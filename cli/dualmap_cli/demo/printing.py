"""Formats the demo's figures: a table after a description of the workload, and JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Final

from dualmap_cli.demo.plan import MODEL, SLO_TTFT_S, Plan
from dualmap_cli.demo.report import PolicyReport, PredictionReport
from dualmap_sim.workloads.statistics import measure

_COLUMNS: Final = (
    *("policy", "TTFT p50", "p90", "p99", "within SLO", "hit rate"),
    *("pending CV", "pending/engine", "errors"),
)
_TELLING_ATTAINMENT: Final = 0.99
"""If every policy reaches this attainment, differences between policies are random."""
_LAG_SHARE: Final = 0.1
"""Share of the SLO that the load generator's delay may reach without distorting the measurement."""


def announcement(plan: Plan) -> str:
    """Return a description of the runs and their expected time, without the start-up time of the processes."""
    replays_s = len(plan.runs) * plan.wall_s(plan.trace.duration_s)
    return (
        f"replaying {len(plan.trace.requests):,} requests under {', '.join(run.name for run in plan.runs)}: "
        f"about {replays_s:.0f} s in all, plus start-up and the last answers"
    )


def served(plan: Plan, url: str, dashboard_urls: Sequence[str]) -> str:
    """Return the addresses of a demo with ``--serve``, and how to end it."""
    dashboards = "\n".join(f"dashboard: {each}" for each in dashboard_urls)
    return (
        f"{dashboards}\n"
        f"requests:  {url}/v1/chat/completions  (model {MODEL}; {plan.rate:.1f} requests per model second come by "
        f"themselves, {plan.speed:g} model seconds a second)\n"
        "Ctrl-C ends it."
    )


def as_document(plan: Plan, reports: Sequence[PolicyReport]) -> dict[str, object]:
    """Return the content of ``--json`` and ``demo.json``."""
    return {
        "workload": {
            "name": plan.trace.name,
            "seed": plan.seed,
            "prompts_cut": plan.prompts_cut,
            **asdict(measure(plan.trace)),
        },
        "engines": plan.engines,
        "routers": plan.routers,
        "speed": plan.speed,
        "slo_ttft_s": SLO_TTFT_S,
        "load": asdict(plan.load),
        "runs": [_run_document(each) for each in reports],
    }


def _run_document(one: PolicyReport) -> dict[str, object]:
    document = asdict(one)
    if one.predictions is None:
        del document["predictions"]
    return document


def table(reports: Sequence[PolicyReport]) -> str:
    """Return the figures as aligned text."""
    rows = [_COLUMNS, *map(_row, reports)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) if not index else cell.rjust(width) for index, (cell, width) in each)
        for each in (enumerate(zip(row, widths, strict=True)) for row in rows)
    ]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def _row(one: PolicyReport) -> tuple[str, ...]:
    def seconds(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f} s"

    return (
        one.policy,
        seconds(one.ttft_p50_s),
        seconds(one.ttft_p90_s),
        seconds(one.ttft_p99_s),
        f"{one.slo_attainment:.1%}",
        f"{one.hit_rate:.1%}",
        "-" if one.pending_cv is None else f"{one.pending_cv:.2f}",
        "-" if one.pending_tokens_mean is None else f"{one.pending_tokens_mean:,.0f} tok",
        ", ".join(f"{count} x {error}" for error, count in sorted(one.errors.items())) or "0",
    )


def predictions(reports: Sequence[PolicyReport]) -> str:
    """Return what the routers predicted of the caches, with and without KV events; empty in a demo without them."""
    lines = [f"{one.policy}: {_predicted(one.predictions)}" for one in reports if one.predictions is not None]
    if not lines:
        return ""
    return "\n".join(("KV events: the engines publish them in every run; the last run's routers use them.", *lines))


def _predicted(one: PredictionReport) -> str:
    text = (
        f"cached tokens as predicted, within a block, in {one.as_predicted:.1%} of the requests; "
        f"{one.stale_hits:,} of {one.predicted_hits:,} predicted hits found nothing"
    )
    if one.events is None:
        return text
    states = ", ".join(f"{number} {state}" for state, number in sorted(one.events.states.items()))
    return (
        f"{text};\n  events of the engines: {states or 'none'}; {one.events.stored:,} blocks stored, "
        f"{one.events.removed:,} removed, {one.events.gaps:,} gaps; they decided {one.from_events:.1%} of the requests"
    )


LEGEND: Final = (
    "pending: prefill tokens not yet computed, as the routers count them; CV: their standard deviation over the\n"
    "engines by their mean (0 is even; a few requests on idle engines are uneven by nature, so read both columns)"
)
"""The explanation after the table."""


def preamble(plan: Plan) -> str:
    """Return a description of the workload, for the lines before the table."""
    facts = measure(plan.trace)
    sessions = f" in {facts.sessions:,} sessions" if facts.sessions is not None else ""
    cut = (
        f"prompts cut to the {plan.engine.input_tokens_max:,} tokens that an engine computes: {plan.prompts_cut:,}\n"
        if plan.prompts_cut
        else ""
    )
    routers = f" behind {plan.routers} routers" if plan.routers > 1 else ""
    return (
        f"workload {plan.trace.name}: {facts.requests:,} requests{sessions}, prompts of "
        f"{facts.input_tokens_mean:,.0f} tokens and answers of {facts.output_tokens_mean:,.0f} on average,\n"
        f"at best {facts.ideal_hit_rate:.0%} of the prompt tokens reusable (one shared cache without a limit)\n{cut}"
        f"load: {plan.rate:.2f} requests/s on {plan.engines} engines{routers}: {plan.load.without_reuse:.0%} of their "
        f"capacity without any reuse, {plan.load.ideal_reuse:.0%} with all of it\n"
        f"times are model seconds; the engines run at {plan.speed:g} times that speed. "
        f"SLO: first token within {SLO_TTFT_S:g} s"
    )


def next_commands(plan: Plan) -> str:
    """Return the commands that analyse the recording of a demo."""
    engine, recording = plan.out / "engine.yaml", plan.recordings[0]
    commands = []
    if len(plan.recordings) > 1:
        recording = plan.out / "recording.jsonl.gz"
        commands.append(f"dualmap trace merge {' '.join(map(str, plan.recordings))} -o {recording}")
    commands += [
        f"dualmap trace show {recording}",
        f"dualmap fit {recording} -o {engine}",
        f"dualmap simulate --recording {recording} --engine {engine}",
        f"dualmap plan --recording {recording} --engine {engine}",
    ]
    lines = "\n".join(f"  {command}" for command in commands)
    return f"The routers recorded the run {plan.runs[-1].name}, in wall-clock time. Next:\n{lines}"


def notes(reports: Sequence[PolicyReport], plan: Plan) -> str:
    """Return notes on the reliability of the figures."""
    lines = [lag_note(reports, plan)]
    if all(one.slo_attainment >= _TELLING_ATTAINMENT for one in reports) and len(reports) > 1:
        lines.append(
            f"note: at least {_TELLING_ATTAINMENT:.0%} of the requests met the SLO under every policy:\n"
            "this run is too light or too short to tell the policies apart"
        )
    return "\n".join(lines)


def lag_note(reports: Sequence[PolicyReport], plan: Plan) -> str:
    """Return how late the load generator was, with a warning if the delay distorts the figures."""
    worst = max(reports, key=lambda one: one.send_lag_p99_wall_s)
    p99_s, max_s = worst.send_lag_p99_wall_s, max(one.send_lag_max_wall_s for one in reports)
    line = (
        f"load generator: 99 % of the requests left within {p99_s * 1000:.0f} ms (wall) of their time, "
        f"all within {max_s * 1000:.0f} ms"
    )
    if p99_s > plan.wall_s(SLO_TTFT_S) * _LAG_SHARE:
        line += (
            f"\nwarning: that is more than {_LAG_SHARE:.0%} of the SLO: this machine is too busy for these figures; "
            "use a lower --speed or fewer --engines"
        )
    return line
