"""Measures what changes between commits cost a request: the ratio of the CPU times of the last commit and the first.

Each commit's own code runs in a process of its own. The processes take turns, each measures the same requests, and a
round gives one ratio for each kind of request. The table has the median of the rounds' ratios, and in brackets the
tenth and ninetieth percentile. Give a commit twice to see what the machine adds.

pick, first token and end: a picker without engines' reports, as ``picks`` measures it.
call: Envoy's messages of a whole request in no-wait mode, as ``replay`` measures it.
"""

import asyncio
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Final

import click

ROOT: Final = Path(__file__).parent.parent
FOLDERS: Final = ("", "core", "edge", "extproc", "sim", "operator", "sidecar", "cli")
SIZES_KB: Final = (1, 64)


@dataclass(frozen=True, slots=True)
class Turns:
    """The process that runs the code of one commit."""

    process: subprocess.Popen[str]

    def take(self) -> dict[str, float]:
        """Return the CPU time of each part in microseconds, from one more round. Raises click.ClickException."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(BrokenPipeError):
            os.write(self.process.stdin.fileno(), b"\n")
        line = self.process.stdout.readline()
        if not line:
            raise click.ClickException("a process has ended; its error is above")
        times_us: dict[str, float] = json.loads(line)
        return times_us


@contextmanager
def turns_of(folder: str) -> Iterator[Turns]:
    """Run the code in a folder until the end of the context."""
    path = os.pathsep.join(str(Path(folder, each)) for each in FOLDERS)
    with subprocess.Popen(
        # Without -P, modules of this file's folder would hide those of the standard library.
        [sys.executable, "-P", __file__],
        env={**os.environ, "PYTHONPATH": path},
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield Turns(process)
        finally:
            process.kill()


@contextmanager
def turns(commit: str) -> Iterator[Turns]:
    """Run the code of a commit until the end of the context."""
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=False)
    if archive.returncode:
        raise click.ClickException(archive.stderr.decode().strip())
    with TemporaryDirectory() as folder:
        with tarfile.open(fileobj=BytesIO(archive.stdout)) as files:
            files.extractall(folder, filter="data")
        with turns_of(folder) as made:
            yield made


async def serve() -> None:
    """Measure one round for each line of the standard input. The modules are those of the commit."""
    from bench import picks, replay

    kinds = [each for each in replay.KINDS if not each.full_duplex and each.body_kb in SIZES_KB]
    replayed = [(each, replay.Picking(), list(replay.reads(each))) for each in kinds]
    subjects = []
    for size_kb in SIZES_KB:
        made, systems = picks.bodies(1024 * size_kb)
        subjects.append((size_kb, picks.subjects(256 * size_kb, systems)[0], made))
    now = 0.0
    for _ in sys.stdin:
        times_us: dict[str, float] = {}
        for size_kb, subject, made in subjects:
            for body in made:
                now += 1.0
                picks.send(subject, now, body, 0.5)
            for part, times_s in (("pick", subject.picks_s), ("first token and end", subject.events_s)):
                times_us[f"{part}, {size_kb} KB"] = 1e6 * median([each for rule in times_s.values() for each in rule])
                times_s.clear()
        for kind, picking, calls in replayed:
            times_us[f"call, {kind.body_kb} KB"] = replay.cpu_us(picking, calls)
        print(json.dumps(times_us), flush=True)


def load() -> str:
    """Return the machine's load average."""
    return f"{os.getloadavg()[0]:.1f}"


@click.command(help=__doc__)
@click.argument("before")
@click.argument("after")
@click.option("--rounds", type=click.IntRange(2), default=30, show_default=True, help="Rounds of both commits.")
def command(before: str, after: str, rounds: int) -> None:
    """Print the table for two commits; ``__doc__`` is the help."""
    began = load()
    with turns(before) as first, turns(after) as second:
        for each in (first, second):
            each.take()  # The first round fills the caches.
        taken = [(first.take(), second.take()) for _ in range(rounds)]
    click.echo(f"load average {began} before and {load()} after; {rounds} rounds\n")
    click.echo(f"| part | {before}, us | {after} / {before} |\n|---|---|---|")
    for part in taken[0][0]:
        ratios = [new[part] / old[part] for old, new in taken]
        low, *_, high = quantiles(ratios, n=10)
        spent_us = median(old[part] for old, _ in taken)
        click.echo(f"| {part} | {spent_us:.0f} | {median(ratios):.3f} ({low:.3f} to {high:.3f}) |")


if __name__ == "__main__":
    asyncio.run(serve())
