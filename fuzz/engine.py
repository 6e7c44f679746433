"""Drives one target in its own process: ``python -m fuzz.engine`` (``__main__`` starts it and reads its stderr).

atheris controls the process and never returns; it uses coverage to select the inputs to mutate. Wheels of atheris exist
for few platforms. Without atheris, or with ``--random``, inputs are mutated at random. The checks and the lines on
stderr are the same.
"""

import hashlib
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Final

import click

from fuzz import targets

INPUT_BYTES: Final = 4096
# An input that takes more seconds is also a finding, because such a request would delay all other requests.
_INPUT_S: Final = 10
_MEMORY_MB: Final = 2048
# Seconds between two progress lines of a random run.
_REPORT_S: Final = 2.0


def name_of(data: bytes) -> str:
    """Return an input's file name in a corpus."""
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()


def guided() -> bool:
    """Return whether atheris is installed."""
    return find_spec("atheris") is not None


def inputs(*folders: Path) -> list[bytes]:
    """Return the inputs of the given corpora, the smallest first."""
    distinct = {path.read_bytes() for folder in folders for path in folder.iterdir()}
    return sorted(distinct, key=lambda data: (len(data), data))


def _run_guided(name: str, *, seconds: int, runs: int, seed: int, folders: tuple[Path, ...], crashes: Path) -> None:
    """Fuzz with atheris; never returns."""
    import atheris

    with atheris.instrument_imports(include=["dualmap", "dualmap_extproc"]):
        target = targets.load(name)
    varied = target.mutate

    def mutate(data: bytes, max_size: int, each_seed: int) -> bytes:
        """Return a mutant; half of the mutants come from the target's own mutator, if it has one."""
        random = Random(each_seed)
        mutant = varied(data, random) if varied is not None and random.random() < 0.5 else None
        return atheris.Mutate(data, max_size) if mutant is None or len(mutant) > max_size else mutant

    options = [
        f"-max_total_time={seconds}",
        f"-runs={runs or -1}",
        f"-seed={seed}",
        f"-max_len={INPUT_BYTES}",
        f"-timeout={_INPUT_S}",
        f"-rss_limit_mb={_MEMORY_MB}",
        f"-artifact_prefix={crashes}/",
    ]
    mutator = {} if varied is None else {"custom_mutator": mutate}
    atheris.Setup([sys.argv[0], *options, *map(str, folders)], target.check, **mutator)
    atheris.Fuzz()


def _run_random(name: str, *, seconds: int, runs: int, seed: int, folders: tuple[Path, ...], crashes: Path) -> None:
    """Fuzz by mutating the corpus at random, each input in a few steps. Exits like atheris if a check fails."""
    target = targets.load(name)
    random = Random(seed)
    seeds = inputs(*folders) or [b""]
    end_s = time.monotonic() + seconds
    report_s = time.monotonic()
    done = 0
    while (not runs or done < runs) and (now_s := time.monotonic()) < end_s:
        if now_s >= report_s:
            report_s = now_s + _REPORT_S
            print(f"#{done}\tpulse", file=sys.stderr, flush=True)
        # The unchanged corpus runs first.
        data = seeds[done] if done < len(seeds) else _vary(random.choice(seeds), random, target.mutate)
        try:
            target.check(data)
        except BaseException:
            crashes.mkdir(parents=True, exist_ok=True)
            (crashes / f"crash-{name_of(data)}").write_bytes(data)
            raise
        done += 1
    print(f"#{done}\tDONE", file=sys.stderr, flush=True)


def _vary(data: bytes, random: Random, mutate: Callable[[bytes, Random], bytes | None] | None) -> bytes:
    for _ in range(random.randint(1, 4)):
        mutant = mutate(data, random) if mutate is not None and random.random() < 0.5 else None
        data = _vary_bytes(data, random) if mutant is None else mutant
    return data[:INPUT_BYTES]


def _vary_bytes(data: bytes, random: Random) -> bytes:
    """Overwrite, insert, remove or repeat a few bytes at a random position."""
    at = random.randint(0, len(data))
    size = random.choice((1, 1, 2, 4, 8, 32))
    match random.randrange(4):
        case 0:
            return data[:at] + random.randbytes(size) + data[at + size :]
        case 1:
            return data[:at] + random.randbytes(size) + data[at:]
        case 2:
            return data[:at] + data[at + size :]
        case _:
            return data[:at] + data[at : at + size] * 2 + data[at + size :]


@click.command()
@click.argument("name")
@click.argument("folders", type=click.Path(path_type=Path), nargs=-1)
@click.option("--seconds", type=int, required=True)
@click.option("--runs", type=int, required=True)
@click.option("--seed", type=int, required=True)
@click.option("--crashes", type=click.Path(path_type=Path), required=True)
@click.option("--random", is_flag=True)
def main(name: str, folders: tuple[Path, ...], seconds: int, runs: int, seed: int, crashes: Path, random: bool) -> None:
    """Fuzz the target NAME from the inputs in FOLDERS, and write new inputs to the first folder.

    fuzz.__main__ runs this command.
    """
    run = _run_random if random else _run_guided
    run(name, seconds=seconds, runs=runs, seed=seed, folders=folders, crashes=crashes)


if __name__ == "__main__":
    main()
