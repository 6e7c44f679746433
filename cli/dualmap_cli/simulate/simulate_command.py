"""The command ``dualmap simulate``: policies at one or more rates, in virtual time."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from dualmap_cli.running import command_errors, require_matplotlib, writing, writing_results
from dualmap_cli.simulate.engine_options import described
from dualmap_cli.simulate.notice_option import read_notices, with_notices
from dualmap_cli.simulate.options import BOUNDS, with_options
from dualmap_cli.simulate.plan import Plan, half_reuse_rate, make_plan, recorded_rate, sample_s
from dualmap_cli.simulate.values import RATE_MOST, count_text, numbers
from dualmap_sim.experiment import Experiment
from dualmap_sim.notices import Notice
from dualmap_sim.repeats import with_changes

if TYPE_CHECKING:
    from dualmap_cli.simulate.as_it_was import AsItWas
    from dualmap_cli.simulate.runs import Run


@click.command(
    epilog=f"{BOUNDS}\n\n"
    "\b\nParameters of the engine model for --set (a prefill of n tokens after h cached ones takes\n"
    "o + (n + a/2 ((n+h)^2 - h^2)) / r + h / l; see docs/engine-model.md):\n" + described()
)
@with_options(
    click.option(
        "--start",
        type=click.IntRange(0),
        default=0,
        show_default=True,
        help="Number of the first request of the window.",
    ),
    click.option("--seed", type=int, default=0, show_default=True, help="Seed of a generated workload."),
    click.option(
        "--qps",
        metavar="RATE[,RATE]",
        callback=numbers(float, 0.001, RATE_MOST),
        help="Mean request rates per second, separated by commas. The trace's arrival times are scaled to each rate.  "
        "[default: that of --recording, or the rate that fully loads the engines if half of the possible cache hits "
        "occur]",
    ),
    click.option(
        "--notice",
        "notices",
        metavar="MEMBER=TIME+DURATION",
        multiple=True,
        callback=read_notices,
        help="Give a member notice at this time after the first request, such as qwen-2=10m+30s: it drains, and stops "
        "after the duration. +0s is a failure without a notice. Repeat the option for several members.",
    ),
)
def simulate(start: int, seed: int, qps: tuple[float, ...] | None, notices: tuple[Notice, ...], **options: Any) -> None:
    """Simulate policies on a workload, with the production router code.

    The production code routes the requests, and a model of the engine serves them in virtual time. Equal options give
    equal results on any machine. The table has one row for each policy and rate.

    All figures leave out warm-up requests. Percentiles cover served requests only. The share within the SLO covers all
    requests, and counts a rejected request as a missed SLO. By default, one router serves all requests and receives
    feedback without delay. To simulate several routers behind one gateway, use
    --routers 4 --feedback-delay 20ms. The pool's owner then decides for all routers, and --hop-delay sets the delay of
    their messages. With --decide local, each router decides by itself, and --view-delay sets the age of its data about
    the others. In the closed-loop workload agentic, the rate is nominal, because each session waits for an answer
    before the next request.

    With --recording, the command first simulates the recording as it was: the recorded times, members and settings,
    with their changes. It prints the figures beside the measured ones, and whether the simulation may be believed for
    this recording. The runs that follow have the pool's last settings, and the recorded members, which join and leave
    at their times. With --pool or --instances, they have equal members from beginning to end.

    With one rate, --plot draws TTFT percentiles and the share within the SLO as bars. With several rates, --plot draws
    these figures as curves over the rate. The chart also shows the hit rate against the load imbalance, and each
    instance's load over time at the highest rate.

    \b
    Example:
      dualmap simulate --workload tool_agent --policy round_robin,dualmap,limit --qps 3,4,5 --plot rates.png
      dualmap simulate --trace conversation.jsonl --start 2000 --requests 2000 --model 14b --set c=250000 --json
      dualmap simulate --pool pool.yaml --policy dualmap,min_ttft --qps 4
      dualmap simulate --recording recording --engine engine.yaml --policy dualmap,min_ttft
      dualmap simulate --recording recording --engine engine.yaml --notice qwen-2=10m+30s
    """
    with command_errors("simulate"):
        plan = make_plan(starts=(start,), seeds=(seed,), repeats_members=True, **options)
        if plan.plot is not None:
            require_matplotlib()
        rates = qps or (recorded_rate(plan.base) or half_reuse_rate(plan.base),)
        experiments = _experiments(plan, rates, notices)
        lost_from_s = min((notice.at_s for notice in notices), default=None)
        # Imported here because rich takes a tenth of a second to load, and neither --help nor a usage error needs it.
        from dualmap_cli.simulate.repeated import repeated

        was = repeated(plan, lost_from_s=lost_from_s)
        _publish(plan, _run(plan, experiments, lost_from_s), was)


def _experiments(plan: Plan, rates: Sequence[float], notices: Sequence[Notice]) -> list[Experiment]:
    """Return the experiments of a plan, one for each policy and rate. Raises BadParameter."""
    experiments = [replace(plan.base, policy=policy, requests_per_s=rate) for policy in plan.policies for rate in rates]
    experiments = [replace(each, sample_s=sample_s(each)) for each in experiments]
    if plan.traffic is not None and plan.repeats_members:
        experiments = [with_changes(each, plan.traffic) for each in experiments]
    return [with_notices(each, notices) for each in experiments]


def _run(plan: Plan, experiments: Sequence[Experiment], lost_from_s: float | None) -> "list[Run]":
    from dualmap_cli.simulate.progress import bar
    from dualmap_cli.simulate.runs import simulate as run_one
    from dualmap_cli.simulate.tables import announcement
    from dualmap_sim.experiment import load_trace
    from dualmap_sim.parallel import run_reporting

    click.echo(announcement(plan), err=True)
    total = len(experiments) * len(load_trace(plan.base).requests)
    with bar(total, count_text(len(experiments), "run")) as shown:
        runs = run_reporting(
            partial(run_one, keep_samples=plan.plot is not None, lost_from_s=lost_from_s),
            experiments,
            processes=plan.processes,
            on_progress=lambda _number, answered: shown.done(answered),
        )
        shown.complete()
    return runs


def _publish(plan: Plan, runs: "Sequence[Run]", was: "AsItWas | None") -> None:
    from dualmap_cli.simulate.documents import runs_document
    from dualmap_cli.simulate.repeated import show_as_it_was
    from dualmap_cli.simulate.tables import LEGEND, losses_table, runs_table, show

    with writing_results():
        if plan.as_json:
            click.echo(runs_document(runs, was))
        else:
            if was is not None:
                show_as_it_was(was)
            show(runs_table(runs))
            if runs[0].losses is not None:
                show(losses_table(runs, was))
            click.echo(LEGEND)
    if plan.plot is not None:
        # Imported here because the library takes half a second to load.
        from dualmap_cli.simulate.charts import draw_runs

        with writing(str(plan.plot)):
            draw_runs(plan.plot, runs)
        click.echo(f"chart: {plan.plot}", err=True)
