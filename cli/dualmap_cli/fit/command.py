"""The command ``dualmap fit``."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import click

from dualmap_cli.running import command_errors, plot_option, require_matplotlib, writing, writing_results
from dualmap_sim.presets import PRESETS
from dualmap_sim.recordings.errors import RecordingError


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    required=True,
    metavar="FILE",
    help="Write the engine to this file, completely or not at all.",
)
@click.option(
    "--pool-name", metavar="NAMESPACE/NAME", help="Pool whose engines are fitted, if the recording has several."
)
@click.option("--json", "as_json", is_flag=True, help="Print the fit as JSON.")
@plot_option(help="Write charts of predicted and measured times to this file (.png or .svg).")
def fit(path: Path, output: Path, pool_name: str | None, as_json: bool, plot: Path | None) -> None:
    """Fit the engine model to the recording at PATH.

    The command estimates the parameters of `dualmap simulate --set` from what the routers saw: times to the first
    token, times to the end, and token counts. Each parameter gets a value, a 90 % interval and a verdict: known, weak
    (a wide interval), or absent (not in this recording). It names members that differ from the others.

    To test the fit, the command fits a second engine to the first half of the recording, and predicts the times to the
    first token of the second half. Requests that are not streamed have no such time. Engines must report cached tokens
    (vLLM: --enable-prompt-tokens-details). Light traffic shows the speeds, heavy traffic the sizes.

    \b
    Example:
      dualmap fit recording -o engine.yaml
      dualmap fit recording -o engine.yaml --plot engine.png
      dualmap simulate --engine engine.yaml --policy dualmap,round_robin
    """
    with command_errors("fit"):
        if find_spec("numpy") is None:
            click.echo("dualmap fit: this command needs the package numpy; run: pip install 'dualmap[demo]'", err=True)
            sys.exit(1)
        if plot is not None:
            require_matplotlib()
        # Imported here because --help and a usage error do not need them.
        from dualmap_cli.engine_file import engine_lines
        from dualmap_cli.fit.documents import fit_document, fit_text
        from dualmap_cli.trace.output import check_output, write_lines
        from dualmap_cli.trace.warnings import warn, warn_of_error
        from dualmap_sim.fitting.estimates import FitError
        from dualmap_sim.fitting.fit import fit_engine
        from dualmap_sim.recordings.reader import Reading
        from dualmap_sim.recordings.replays import SeveralPools, chosen_pool, read_pools

        check_output(output, [path])
        if plot is not None and plot.resolve() == output.resolve():
            raise click.UsageError("--plot and --output name the same file; give two files")
        try:
            reading = Reading([path])
            pools = read_pools(reading)
            name = chosen_pool(pools, pool_name or "", reading)
        except SeveralPools as error:
            warn_of_error(error)
            raise click.BadParameter(str(error), param_hint="--pool-name") from error
        except RecordingError as error:
            warn_of_error(error)
            click.echo(f"dualmap fit: {error}", err=True)
            sys.exit(2)
        warn(reading)
        recorded, complete = pools[name], min(reading.samples) == 1.0
        try:
            fitted = fit_engine(name, recorded.requests, known=recorded.pool, base=PRESETS["7b"], complete=complete)
        except FitError as error:
            click.echo(f"dualmap fit: {path}: {error}", err=True)
            sys.exit(1)
        with writing(str(output)):
            write_lines(output, engine_lines(fitted))
        with writing_results():
            if as_json:
                click.echo(json.dumps(fit_document(fitted, reading), indent=2, allow_nan=False))
            else:
                click.echo(fit_text(fitted))
        if plot is not None:
            from dualmap_cli.fit.charts import draw_fit

            with writing(str(plot)):
                draw_fit(plot, fitted)
            click.echo(f"chart: {plot}", err=True)
        click.echo(f"engine: {output}", err=True)
