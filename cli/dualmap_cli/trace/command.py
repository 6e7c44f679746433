"""The command ``dualmap trace`` with its subcommands."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Final

import click

from dualmap_cli.running import command_errors, plot_option, require_matplotlib, writing, writing_results
from dualmap_extproc.app.hash_key import hash_key_option
from dualmap_sim.recordings.errors import RecordingError

_PATH: Final = click.Path(path_type=Path)
_output = click.option(
    "-o",
    "--output",
    type=_PATH,
    required=True,
    metavar="FILE",
    help="Write this file, completely or not at all. It is compressed if its name ends in .gz.",
)


@click.group()
def trace() -> None:
    """Show, merge, export and import recordings of a router's traffic.

    `dualmap router --record DIR` writes a recording: one line a request, with times, token counts, the decision and
    keyed hashes of the prompt's blocks, but no text. A PATH is such a folder, one of its files, or a merged file, also
    while the router writes. Damaged lines are left out with a warning.

    \b
    Example:
      dualmap trace show recording
      dualmap trace merge recording-a recording-b -o both.jsonl.gz
      dualmap trace export both.jsonl.gz --format mooncake -o trace.jsonl
    """


@contextmanager
def _errors(subcommand: str) -> Iterator[None]:
    """Exit with 2 if a recording cannot be used, and with 1 if a result cannot be written."""
    with command_errors(f"trace {subcommand}"):
        try:
            yield
        except RecordingError as error:
            click.echo(f"dualmap trace {subcommand}: {error}", err=True)
            sys.exit(2)


@trace.command()
@click.argument("path", type=_PATH)
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
@plot_option(help="Write charts of rate, lengths, latencies and outcomes to this file (.png or .svg).")
def show(path: Path, as_json: bool, plot: Path | None) -> None:
    """Print what is in the recording at PATH.

    Prompt tokens are the engines' counts, or the router's estimate where the engine reported none. Reuse at best is the
    share of prompt tokens in full blocks that an earlier prompt began with: the hit rate of one cache without a limit.
    The hit rate is what the engines reported. TTFT covers streamed answers. The share within the SLO covers streamed
    and refused requests, and a refused request counts as a miss. A hot prefix ends where less than 80 % of its
    requests have the same next block.

    \b
    Example:
      dualmap trace show recording
      dualmap trace show recording --json
      dualmap trace show recording --plot recording.png
    """
    with _errors("show"):
        if plot is not None:
            require_matplotlib()
        # Imported here because --help and a usage error do not need them.
        from dualmap_cli.trace.documents import figures_document
        from dualmap_cli.trace.texts import figures_text
        from dualmap_cli.trace.warnings import warn
        from dualmap_sim.recordings.figures import compute_figures
        from dualmap_sim.recordings.reader import Reading

        reading = Reading([path])
        figures = compute_figures(reading.events())
        warn(reading)
        with writing_results():
            click.echo((figures_document if as_json else figures_text)(reading, figures))
        if plot is not None:
            from dualmap_cli.trace.charts import draw_figures

            with writing(str(plot)):
                draw_figures(plot, figures, title=str(path))
            click.echo(f"chart: {plot}", err=True)


@trace.command()
@click.argument("paths", type=_PATH, nargs=-1, required=True, metavar="PATH...")
@_output
@click.option(
    "--separate-keys",
    is_flag=True,
    help="Accept recordings whose hashes have different keys. Their prompts and sessions then have nothing in common.",
)
def merge(paths: tuple[Path, ...], output: Path, separate_keys: bool) -> None:
    """Merge the recordings at PATH... into one file, in order of time.

    Hashes of two recordings can be compared if both routers had the same DIR/key. A request that several files have,
    such as a file that is given twice, counts once. Damaged lines are left out with a warning.

    \b
    Example:
      dualmap trace merge recording-a recording-b -o both.jsonl.gz
      dualmap trace merge recording-a old.jsonl.gz -o all.jsonl.gz --separate-keys
    """
    with _errors("merge"):
        from dualmap_cli.trace.output import check_output, write_lines
        from dualmap_cli.trace.warnings import warn
        from dualmap_sim.recordings.merging import merged_lines
        from dualmap_sim.recordings.reader import Reading

        check_output(output, paths)
        reading = Reading(paths)
        lines = merged_lines(reading, separate_keys=separate_keys, program=version("dualmap"))
        with writing(str(output)):
            count = write_lines(output, lines)
        warn(reading)
        click.echo(f"{output}: {count - 1:,} lines of {len(reading.sources)} files", err=True)


@trace.command()
@click.argument("path", type=_PATH)
@click.option(
    "--format",
    "format_name",
    type=click.Choice(["mooncake", "aiperf"]),
    required=True,
    help="The format: Mooncake's JSONL traces, or a trace for NVIDIA AIPerf (--custom-dataset-type mooncake_trace).",
)
@_output
def export(path: Path, format_name: str, output: Path) -> None:
    """Convert the recording at PATH to a trace for other programs.

    Each line of the trace is a request with its arrival in milliseconds after the first one, the lengths of prompt and
    output, and one id for each recorded block. Equal ids mean equal prefixes. The first line on stderr says how many
    tokens a block has; give AIPerf this number as --isl-block-size. Lengths are the engines' counts, changed as far as
    the number of blocks requires. A request without a known output has no output_length in AIPerf's format, and the
    output_length 1 in Mooncake's.

    \b
    Example:
      dualmap trace export recording --format mooncake -o trace.jsonl
      dualmap trace export recording --format aiperf -o aiperf.jsonl
    """
    with _errors("export"):
        from dualmap_cli.trace.output import check_output, write_lines
        from dualmap_cli.trace.warnings import warn, warn_of_changes
        from dualmap_sim.recordings.exports import Export, ExportFormat
        from dualmap_sim.recordings.reader import Reading

        check_output(output, [path])
        reading = Reading([path])
        try:
            exported = Export(reading.requests, ExportFormat(format_name))
        except RecordingError:
            warn(reading)
            raise
        with writing(str(output)):
            count = write_lines(output, exported.lines())
        estimate = exported.router_block_tokens
        shown = "" if estimate == exported.block_tokens else f" ({estimate} by the router's estimate)"
        click.echo(f"a block has {exported.block_tokens} tokens{shown}", err=True)
        warn(reading)
        warn_of_changes(exported.changes)
        click.echo(f"{output}: {count:,} requests", err=True)


@trace.command("import")
@click.argument("file", type=_PATH)
@click.option(
    "--format",
    "format_name",
    type=click.Choice(["mooncake", "openai"]),
    required=True,
    help="The format of FILE: Mooncake's JSONL traces, or a log of OpenAI requests and responses.",
)
@_output
@click.option(
    "--key",
    "key_file",
    type=_PATH,
    metavar="FILE",
    help="Hash with the key in this file, which is DIR/key of a router.  [default: a new key, which is not kept]",
)
@hash_key_option(default="the key that a router makes of --key")
def import_(file: Path, format_name: str, output: Path, key_file: Path | None, hash_key: bytes | None) -> None:
    """Convert FILE to a recording.

    A line of a log (openai) is {"timestamp": TIME, "request": BODY, "response": BODY}. TIME is in seconds since the
    epoch or in ISO 8601, and the response's usage has the counts of tokens. No text is kept. Equal prompts have equal
    hashes in the import and in a router's recording if both have the same keys and the same name of the model, and
    the pool's blockTokens is 128. The keys are DIR/key, and the router's --hash-key-file if it has one.

    What FILE lacks is absent from the recording: a log has no receipts and no TTFT, and a trace no times since the
    epoch, so that its first request arrives in 1970. Lines that cannot be used are left out with a warning.

    \b
    Example:
      dualmap trace import trace.jsonl --format mooncake -o imported.jsonl.gz
      dualmap trace import log.jsonl --format openai -o imported.jsonl.gz --key recording/key
    """
    with _errors("import"):
        from dualmap_cli.trace.keys import recording_key
        from dualmap_cli.trace.output import check_output, write_lines
        from dualmap_cli.trace.warnings import warn_of_left_out
        from dualmap_sim.recordings.from_mooncake import MooncakeReader
        from dualmap_sim.recordings.from_openai import OpenAiReader
        from dualmap_sim.recordings.imports import Import

        check_output(output, [file] if key_file is None else [file, key_file])
        key = recording_key(key_file, hash_key)
        reader = MooncakeReader(file, key) if format_name == "mooncake" else OpenAiReader(key)
        imported = Import(file, reader, key=key, program=version("dualmap"))
        with writing(str(output)):
            count = write_lines(output, imported.lines())
        if isinstance(reader, MooncakeReader):
            click.echo(f"a block has {reader.block_tokens} tokens", err=True)
        warn_of_left_out(imported)
        click.echo(f"{output}: {count - 1:,} requests", err=True)
