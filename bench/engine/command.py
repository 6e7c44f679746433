"""The command ``python -m bench.engine``: records a real vLLM, fits the engine model, and reports its errors."""

import asyncio
import sys
from pathlib import Path

import click
from bench.engine.client import EngineError
from bench.engine.fit import FitError
from bench.engine.plot import plot
from bench.engine.record import record as make_recording
from bench.engine.recording import RecordingError, read_recording, write_recording
from bench.engine.report import fit_and_replay, markdown
from bench.engine.serve import ServeError, options_of, serving

_EXISTING = click.Path(exists=True, dir_okay=False, path_type=Path)
_NEW = click.Path(dir_okay=False, writable=True, path_type=Path)


@click.group(context_settings={"show_default": True})
def engine() -> None:
    """Compare the engine model of the simulator with a real vLLM.

    \b
    Example, with vLLM in another virtual environment:
      python -m bench.engine record --python /tmp/vllm/bin/python --step-tokens 512 --out chunked.jsonl
      python -m bench.engine fit chunked.jsonl --plot chunked.png
    """


@engine.command()
@click.option("--url", help="URL of a running engine, such as http://127.0.0.1:8000.")
@click.option(
    "--python",
    type=_EXISTING,
    help="Python interpreter with vLLM installed. The command starts vLLM with this interpreter and a small random "
    "model.",
)
@click.option("--step-tokens", required=True, type=click.IntRange(32), help="vLLM's --max-num-batched-tokens.")
@click.option("--whole", is_flag=True, help="With --python: start vLLM with --no-enable-chunked-prefill.")
@click.option(
    "--options",
    default="",
    help="With --url: command-line options of the engine. The benchmark only stores them in the recording.",
)
@click.option(
    "--rounds", default=4, type=click.IntRange(2, 20), help="Number of rounds. Each round sends every prompt once."
)
@click.option("--out", required=True, type=_NEW, help="File to write the recording to.")
def record(
    *, url: str | None, python: Path | None, step_tokens: int, whole: bool, options: str, rounds: int, out: Path
) -> None:
    """Send prompts to a real engine, and record when each token arrives.

    The command sends prompts one at a time and in queues, to a cold and to a warm prefix cache. Four rounds take about
    six minutes on one idle core.

    \b
    Example:
      python -m bench.engine record --url http://127.0.0.1:8000 --step-tokens 2048 --out recording.jsonl
    """
    if (url is None) == (python is None):
        raise click.UsageError("give either --url or --python")
    if url is not None and whole:
        raise click.UsageError("--whole requires --python; give --python instead of --url")

    async def run() -> None:
        if url is not None:
            recording = await make_recording(url, rounds=rounds, step_tokens=step_tokens, options=options, say=_say)
        else:
            assert python is not None
            given = options_of(step_tokens=step_tokens, whole=whole)
            async with serving(python, given, say=_say) as its_url:
                recording = await make_recording(
                    its_url, rounds=rounds, step_tokens=step_tokens, options=" ".join(given), say=_say
                )
        write_recording(out, recording)

    try:
        asyncio.run(run())
    except (EngineError, ServeError) as error:
        click.echo(f"bench.engine record: {error}", err=True)
        sys.exit(1)


@engine.command()
@click.argument("recordings", nargs=-1, required=True, type=_EXISTING)
@click.option(
    "--plot", "picture", type=_NEW, help="Write a PNG chart that compares the model's TTFT with the measured TTFT."
)
def fit(*, recordings: tuple[Path, ...], picture: Path | None) -> None:
    """Fit the engine model to half of each recording's rounds, predict the other half, and print the errors.

    \b
    Example:
      python -m bench.engine fit tests/sim/fixtures/vllm_chunked.jsonl --plot engine.png
    """
    columns = []
    try:
        for path in recordings:
            recording = read_recording(path)
            fitted = fit_and_replay(recording)
            columns.append((path.stem, fitted))
            click.echo(f"## {path.stem}\n\n{markdown(recording, fitted)}\n")
    except RecordingError as error:
        click.echo(f"bench.engine fit: {error}", err=True)
        sys.exit(2)
    except FitError as error:
        click.echo(f"bench.engine fit: {path}: {error}", err=True)
        sys.exit(1)
    if picture is not None:
        plot(picture, columns)


def _say(line: str) -> None:
    click.echo(line, err=True)
