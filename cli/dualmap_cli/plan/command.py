"""The command ``dualmap plan``."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dualmap.pools.pool import Pool, Slo
from dualmap_cli.plan.peak_option import read_peak
from dualmap_cli.running import command_errors, plot_option, require_matplotlib, writing, writing_results
from dualmap_cli.simulate.engine_options import changed, read_engine_file
from dualmap_cli.simulate.plan import Plan, make_plan
from dualmap_cli.simulate.pool_option import read_pool
from dualmap_cli.simulate.values import duration, factor, window_text
from dualmap_sim.option_checks import FiniteFloatRange
from dualmap_sim.planning.capacity import Engines
from dualmap_sim.planning.sizes import Unattainable
from dualmap_sim.planning.windows import Peak
from dualmap_sim.presets import PRESETS

if TYPE_CHECKING:
    from dualmap_cli.engine_file import EngineFile


@click.command()
@click.option(
    "--recording",
    metavar="PATH",
    required=True,
    type=click.Path(path_type=Path),
    help="Plan for this recorded traffic.",
)
@click.option(
    "--engine",
    "engine_file",
    metavar="FILE",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    callback=read_engine_file,
    help="Engine, as `dualmap fit` writes it.",
)
@click.option(
    "--pool",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    callback=read_pool,
    help="Take the settings from this file with one InferencePool object.  [default: the recorded pool]",
)
@click.option("--pool-name", metavar="NAMESPACE/NAME", help="Pool to plan, if the recording has several.")
@click.option(
    "--growth",
    metavar="FACTOR",
    callback=factor,
    default="1x",
    show_default=True,
    help="Plan for more or fewer sessions than recorded, such as 2x.",
)
@click.option(
    "--slo",
    "slo_ttft_s",
    metavar="DURATION",
    callback=duration(0.001, 3600.0),
    help="TTFT objective.  [default: that of the pool]",
)
@click.option(
    "--attainment",
    type=FiniteFloatRange(0.01, 1.0),
    help="Share of requests that must receive their first token within the SLO.  [default: that of the pool]",
)
@click.option(
    "--peak",
    metavar="PERCENTILE-WINDOW",
    callback=read_peak,
    help="Keep the SLO in this share of all windows of time, such as p99-hour, p90-day or p95-10m. The percentile is "
    "above 0 and at most 100, with up to three decimals. The window is hour, day, or from 1s to 8784h (366 days). "
    "Windows with fewer than 20 requests count on average only.  [default: on average over the recording]",
)
@click.option("--requests", type=click.IntRange(1), help="Number of requests to replay.  [default: all]")
@click.option(
    "--model",
    type=click.Choice(list(PRESETS)),
    default="7b",
    show_default=True,
    help="Engine preset for what is absent in --engine.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
@plot_option(help="Write a chart of the sizes to this file (.png or .svg).")
def plan(
    recording: Path,
    engine_file: "EngineFile",
    pool: Pool | None,
    pool_name: str | None,
    growth: float,
    slo_ttft_s: float | None,
    attainment: float | None,
    peak: Peak | None,
    requests: int | None,
    model: str,
    as_json: bool,
    plot: Path | None,
) -> None:
    """Find the least number of instances that keeps the SLO on recorded traffic.

    The command simulates the recording with different numbers of instances. It prints the least number with the share
    of requests within the SLO, the next two smaller sizes, and what would change the number: settings of the pool,
    autoscaling, a larger cache, and a KV store. Intervals cover the engine's fit and the variation of the traffic.

    A pool with spec.prefillPool gets the least number of prefill and decode instances. With --peak, the share must be
    within the SLO in each window of time, except the worst ones outside of the percentile.

    The first quarter of the requests, at most 500, does not count, because the simulated caches are empty at the start.

    The recording is first simulated as it was. If the simulation does not repeat what was measured, a warning says so.

    \b
    Example:
      dualmap plan --recording recording --engine engine.yaml
      dualmap plan --recording recording --engine engine.yaml --growth 2x --slo 5s --attainment 0.95 --plot plan.png
      dualmap plan --recording recording --engine engine.yaml --peak p99-hour
    """
    with command_errors("plan"):
        if plot is not None:
            require_matplotlib()
        made = _made(recording, engine_file, pool, pool_name, growth, slo_ttft_s, requests, model)
        usual = made.base.engine
        engines = Engines(
            usual=usual,
            slowest=changed(usual, engine_file.slowest, hint="--engine"),
            fastest=changed(usual, engine_file.fastest, hint="--engine"),
        )
        attainment = attainment or (made.pool.slo if made.pool is not None else Slo()).attainment
        # Imported here because rich takes a tenth of a second to load, and --help does not need it.
        from dualmap_cli.plan.output import plan_document, plan_text
        from dualmap_cli.plan.result import make_capacity_plan
        from dualmap_cli.simulate.progress import bar

        try:
            with bar(None, "simulating") as shown:
                result = make_capacity_plan(
                    made,
                    engines,
                    attainment,
                    peak=peak,
                    known=dict(engine_file.parameters),
                    on_run=lambda: shown.done(1),
                )
        except Unattainable as error:
            click.echo(f"dualmap plan: {_reason(error, attainment, made.base.slo_ttft_s, peak)}", err=True)
            sys.exit(1)
        for warning in result.warnings:
            click.echo(f"warning: {warning}", err=True)
        with writing_results():
            if as_json:
                click.echo(json.dumps(plan_document(result), indent=2, allow_nan=False))
            else:
                click.echo(plan_text(result, attainment=attainment, slo_ttft_s=made.base.slo_ttft_s))
        if plot is not None:
            from dualmap_cli.plan.charts import draw_plan

            with writing(str(plot)):
                draw_plan(plot, result, attainment=attainment, slo_ttft_s=made.base.slo_ttft_s)
            click.echo(f"chart: {plot}", err=True)


def _made(
    recording: Path,
    engine_file: "EngineFile",
    pool: Pool | None,
    pool_name: str | None,
    growth: float,
    slo_ttft_s: float | None,
    requests: int | None,
    model: str,
) -> Plan:
    """Return the options of the simulations. Raises UsageError or BadParameter."""
    return make_plan(
        trace_file=None, recording=recording, pool_name=pool_name, scale=growth, workload=None, sessions=None,
        requests=requests, warmup=None, starts=(0,), seeds=(0,), pool=pool, policies=None, instances=None,
        prefillers=0, model=model, engine_file=engine_file, parameters=(), slow=(), slo_ttft_s=slo_ttft_s, routers=1,
        decide="owner", hop_delay_s=0.001, view_delay_s=0.1, feedback_delay_s=0.0, believed_speed=None,
        store_tokens_per_s=None, processes=None, plot=None, as_json=False, has_set=False,
    )  # fmt: skip


def _reason(error: Unattainable, attainment: float, slo_ttft_s: float, peak: Peak | None) -> str:
    """Return why no number of instances suffices."""
    where = "" if peak is None else f" in the windows of --peak ({window_text(peak.window_s)})"
    if error.instances is None:
        return (
            f"no number of instances serves {attainment:.1%} of the requests{where} within {slo_ttft_s:g} s, because "
            f"the prefill alone takes longer for {1 - error.share:.1%} of them; give a longer --slo, a lower "
            "--attainment, or faster engines"
        )
    return (
        f"{error.instances} instances serve only {error.share:.1%} of the requests{where} within {slo_ttft_s:g} s, "
        f"less than {attainment:.1%}; give a longer --slo or a lower --attainment"
    )
