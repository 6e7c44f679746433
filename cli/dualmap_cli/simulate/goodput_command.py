"""``dualmap goodput``: the highest rate at which each policy meets the SLO, in virtual time."""

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from dualmap.pools.pool import Slo
from dualmap_cli.running import command_errors, require_matplotlib, writing, writing_results
from dualmap_cli.simulate.engine_options import described
from dualmap_cli.simulate.options import BOUNDS, with_options
from dualmap_cli.simulate.plan import Plan, make_plan
from dualmap_cli.simulate.values import numbers
from dualmap_sim.option_checks import FiniteFloatRange

if TYPE_CHECKING:
    from dualmap_cli.simulate.as_it_was import AsItWas
    from dualmap_cli.simulate.runs import Found


@click.command(
    epilog=f"{BOUNDS}\n\n\b\nParameters of the engine model for --set (see: dualmap simulate --help):\n" + described()
)
@with_options(
    click.option(
        "--starts",
        metavar="N[,N]",
        callback=numbers(int, 0, 10_000_000),
        default="0",
        show_default=True,
        help="Numbers of the windows' first requests, separated by commas.",
    ),
    click.option(
        "--seeds",
        metavar="N[,N]",
        callback=numbers(int, 0, 2**31),
        default="0",
        show_default=True,
        help="Seeds of a generated workload, separated by commas. Each seed adds one window for each value of "
        "--starts.",
    ),
    click.option(
        "--attainment",
        type=FiniteFloatRange(0.01, 1.0),
        help="Share of requests that must receive their first token within the SLO.  [default: that of --pool, or 0.9]",
    ),
    click.option(
        "--tolerance",
        type=FiniteFloatRange(0.0001, 1.0),
        default=0.01,
        show_default=True,
        help="Relative precision of the resulting rate.",
    ),
)
def goodput(
    starts: tuple[int, ...], seeds: tuple[int, ...], attainment: float | None, tolerance: float, **options: Any
) -> None:
    """Find the highest request rate at which each policy meets the SLO.

    The command searches the rate by bisection for each policy and window. Each run executes the production router
    code in virtual time. A run stops early if it can no longer meet the SLO. The table shows each policy's mean over
    the windows, with the lowest and highest value. For capacity planning, use the lowest value, and windows that are
    much longer than the SLO.

    A rejected request counts as a missed SLO. Warm-up requests do not count. By default, one router serves all requests
    and receives feedback without delay. To simulate several routers behind one gateway, use
    --routers 4 --feedback-delay 20ms. The pool's owner then decides for all routers, and --hop-delay sets the delay of
    their messages. With --decide local, each router decides by itself, and --view-delay sets the age of its data about
    the others. In the closed-loop workload agentic, the rate is nominal, because each session waits for an answer
    before the next request.

    With --recording, the command first simulates the recording as it was, from the first of --starts on. It prints the
    figures beside the measured ones, and whether the simulation may be believed.

    --plot draws the means as bars and each window's value as a dot.

    \b
    Example:
      dualmap goodput --workload tool_agent --seeds 0,1,2 --policy round_robin,preble,dualmap,limit
      dualmap goodput --trace conversation.jsonl --starts 0,2000,4000 --requests 2000 --model 14b --plot goodput.png
    """
    with command_errors("goodput"):
        plan = make_plan(starts=starts, seeds=seeds, **options)
        if plan.plot is not None:
            require_matplotlib()
        if (plan.base.workload.trace is not None or plan.traffic is not None) and len(seeds) > 1:
            click.echo("--seeds has no effect: a recorded trace is the same for all seeds", err=True)
        attainment = attainment or (plan.pool.slo if plan.pool is not None else Slo()).attainment
        # Imported here because rich takes a tenth of a second to load, and neither --help nor a usage error needs it.
        from dualmap_cli.simulate.repeated import repeated

        was = repeated(plan)
        found = _search(plan, attainment, tolerance)
        _publish(plan, attainment, found, was)


def _search(plan: Plan, attainment: float, tolerance: float) -> "Found":
    from dualmap_cli.simulate.progress import bar
    from dualmap_cli.simulate.runs import Search, search
    from dualmap_cli.simulate.tables import announcement
    from dualmap_sim.parallel import run_reporting

    click.echo(announcement(plan), err=True)
    searches = [
        Search(
            experiment=replace(plan.base, policy=policy, workload=window), attainment=attainment, tolerance=tolerance
        )
        for policy in plan.policies
        for window in plan.windows
    ]
    with bar(len(searches), "searching") as shown:

        def trying(number: int, rate: float) -> None:
            experiment = searches[number].experiment
            window = f"start {experiment.workload.start}, seed {experiment.workload.seed}"
            shown.doing(f"{experiment.policy}, {window}: trying {rate:.3g}/s")

        answers = run_reporting(
            search, searches, processes=plan.processes, on_progress=trying, on_done=lambda *_: shown.done(1)
        )
    windows = len(plan.windows)
    return [(policy, answers[number * windows : (number + 1) * windows]) for number, policy in enumerate(plan.policies)]


def _publish(plan: Plan, attainment: float, found: "Found", was: "AsItWas | None") -> None:
    from dualmap_cli.simulate.documents import goodputs_document
    from dualmap_cli.simulate.repeated import show_as_it_was
    from dualmap_cli.simulate.runs import rates
    from dualmap_cli.simulate.tables import GOODPUT_LEGEND, goodputs_table, short_windows, show
    from dualmap_sim.goodput import NeverOverloaded

    endless = [each for _, answers in found for each in answers if isinstance(each, NeverOverloaded)]
    for each in dict.fromkeys(map(str, endless)):
        click.echo(f"dualmap goodput: {each}", err=True)
    overloaded = [(policy, own) for policy, answers in found if (own := rates(answers)) is not None]
    for warning in short_windows(plan, found):
        click.echo(f"warning: {warning}", err=True)
    with writing_results():
        if plan.as_json:
            click.echo(goodputs_document(plan, attainment, found, was))
        else:
            if was is not None:
                show_as_it_was(was)
            show(goodputs_table(found))
            click.echo(GOODPUT_LEGEND)
    if not overloaded:
        sys.exit(1)
    if plan.plot is not None:
        # Imported here because the library takes half a second to load.
        from dualmap_cli.simulate.charts import draw_goodputs

        with writing(str(plan.plot)):
            draw_goodputs(plan.plot, overloaded, attainment=attainment, slo_ttft_s=plan.base.slo_ttft_s)
        click.echo(f"chart: {plan.plot}", err=True)
