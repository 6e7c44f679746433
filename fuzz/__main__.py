"""``python -m fuzz``: runs each target in its own process for a given time, and prints a table of the results."""

import re
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from random import SystemRandom
from typing import Final

import click

from fuzz import engine
from fuzz.minimise import minimise
from fuzz.targets import TARGETS

CORPUS: Final = Path(__file__).parent / "corpus"
# Git ignores this folder, and make clean removes it.
WORK: Final = Path("build", "fuzz")
# A progress line of libFuzzer or of a random run; it contains nothing about a crash.
_PROGRESS: Final = re.compile(r"#(\d+)\t\w+(?:\s+cov: (\d+))?")
_NOISE: Final = re.compile(r"(INFO|WARNING): ")
# Seconds between two progress lines; libFuzzer also reports every new input.
_REPORT_S: Final = 5.0
# The number of lines to print from the end of a crashed run's output. The lines contain the traceback.
_TAIL_LINES: Final = 60


@dataclass(slots=True, kw_only=True)
class Run:
    """The results of a target's run.

    ``coverage`` is the number of reached branches, None if it was not measured. ``found`` is the number of new inputs.
    """

    name: str
    executions: int = 0
    coverage: int | None = None
    corpus: int = 0
    found: int = 0
    crashed: bool = False
    reproducers: tuple[Path, ...] = ()


def fuzz(name: str, work: Path, *, seconds: int, runs: int, seed: int, random: bool) -> Run:
    """Run one target in a child process, with its progress on stderr."""
    found, committed, crashes = work / "corpus" / name, CORPUS / name, work / "crashes" / name
    for folder in (found, committed, crashes):
        folder.mkdir(parents=True, exist_ok=True)
    known, crashed = set(found.iterdir()), _versions(crashes)
    limits = [f"--seconds={seconds}", f"--runs={runs}", f"--seed={seed}", f"--crashes={crashes}"]
    command = [sys.executable, "-m", "fuzz.engine", name, str(found), str(committed), *limits]
    run = Run(name=name, corpus=len(known) + len(list(committed.iterdir())))
    with subprocess.Popen(
        [*command, "--random"] if random else command,
        cwd=CORPUS.parents[1],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as child:
        assert child.stdout is not None
        tail: deque[str] = deque(maxlen=_TAIL_LINES)
        report_s = time.monotonic() + _REPORT_S
        for line in child.stdout:
            if not _note(run, line):
                tail.append(line)
            elif time.monotonic() >= report_s:
                report_s = time.monotonic() + _REPORT_S
                click.echo(f"{name}: {run.executions} executions", err=True)
    run.crashed = child.returncode != 0
    run.found = len(set(found.iterdir()) - known)
    run.reproducers = tuple(sorted(path for path, _ in _versions(crashes) - crashed))
    if run.crashed:
        click.echo("".join(tail), err=True, nl=False)
    return run


def _versions(folder: Path) -> set[tuple[Path, int]]:
    """Return a folder's files with their modification times, because a repeated crash writes its input again."""
    return {(path, path.stat().st_mtime_ns) for path in folder.iterdir()}


def _note(run: Run, line: str) -> bool:
    """Parse a progress line. Return False for any other line; such lines are printed if the run crashes."""
    progress = _PROGRESS.match(line)
    if progress is None:
        return _NOISE.match(line) is not None
    run.executions = int(progress[1])
    if progress[2] is not None:
        run.coverage = int(progress[2])
    return True


def table(done: list[Run]) -> str:
    """Return the summary: a line for each target, and a line for each input that crashed the target."""
    lines = [f"{'target':<12} {'executions':>10} {'branches':>8} {'corpus':>6} {'new':>5}  result"]
    for run in done:
        coverage = "-" if run.coverage is None else str(run.coverage)
        result = "crashed" if run.crashed else "ok"
        lines.append(f"{run.name:<12} {run.executions:>10} {coverage:>8} {run.corpus:>6} {run.found:>5}  {result}")
        lines.extend(f"  reproducer: {path}" for path in run.reproducers)
    return "\n".join(lines)


def _help() -> str:
    listed = "\n".join(f"  {name:<12} {what}" for name, what in TARGETS.items())
    return f"\b\nTargets:\n{listed}"


@click.command(epilog=_help())
@click.argument("names", metavar="[TARGET]...", type=click.Choice(list(TARGETS)), nargs=-1)
@click.option(
    "--seconds",
    type=click.IntRange(1, 86_400),
    default=30,
    show_default=True,
    help="Duration of the fuzzing of each target, in seconds.",
)
@click.option("--runs", type=click.IntRange(0), default=0, help="Stop each target after this number of executions.")
@click.option(
    "--seed", type=click.IntRange(1, 2**31 - 1), help="Random seed, to repeat an earlier run. Default: a new seed."
)
@click.option(
    "--work",
    type=click.Path(file_okay=False, path_type=Path),
    default=WORK,
    show_default=True,
    help="Folder for new inputs and crashes.",
)
@click.option("--random", is_flag=True, help="Mutate inputs at random, even if atheris is installed.")
@click.option(
    "--minimise",
    "shrink",
    is_flag=True,
    help="Do not fuzz. Add inputs of earlier runs to the corpus if the inputs cover new code.",
)
def main(
    names: tuple[str, ...], seconds: int, runs: int, seed: int | None, work: Path, random: bool, shrink: bool
) -> None:
    """Fuzz the router's parsers with malformed input, and check the parsers' invariants.

    Each TARGET (default: all) starts from fuzz/corpus/TARGET and the inputs of earlier runs. The command writes new
    inputs to build/fuzz/corpus/TARGET and crashes to build/fuzz/crashes/TARGET. The exit status is 1 if any target
    crashed.

    \b
    python -m fuzz --seconds 60 body     # fuzz one target for a minute
    python -m fuzz --minimise            # add inputs that cover new code to the corpus
    python -c "from fuzz.targets import load; load('body').check(open('crash-...', 'rb').read())"    # repeat one input
    """
    chosen = names or tuple(TARGETS)
    if shrink:
        for name in chosen:
            kept, of, size = minimise(name, CORPUS / name, work / "corpus" / name)
            click.echo(f"{name:<12} {kept} of {of} inputs kept, {size} bytes")
        return
    if not random and not engine.guided():
        click.echo("atheris is not installed; mutating inputs at random instead", err=True)
        random = True
    seed = seed or SystemRandom().randint(1, 2**31 - 1)
    done = []
    for name in chosen:
        click.echo(f"{name}: {TARGETS[name]} (seed {seed})", err=True)
        begin_s = time.monotonic()
        run = fuzz(name, work.resolve(), seconds=seconds, runs=runs, seed=seed, random=random)
        click.echo(f"{name}: {run.executions} executions in {time.monotonic() - begin_s:.0f} s", err=True)
        done.append(run)
    click.echo(table(done))
    sys.exit(any(run.crashed for run in done))


if __name__ == "__main__":
    main()
