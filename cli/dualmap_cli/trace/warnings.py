"""Warnings on stderr about what a recording lacks: the first damaged lines, and how many there are."""

from collections.abc import Sequence
from typing import Final

import click

from dualmap_sim.recordings.errors import RecordingError
from dualmap_sim.recordings.exports import Changes
from dualmap_sim.recordings.imports import Import
from dualmap_sim.recordings.reader import Damage, Reading
from dualmap_sim.recordings.replays import Unusable

_SHOWN: Final = 5


def warn(reading: Reading) -> None:
    """Print warnings about a recording that was read completely."""
    _warn_of_lines(reading.damaged, reading.damaged_lines)
    if len(reading.samples) > 1:
        shares = ", ".join(f"{sample:g}" for sample in reading.samples)
        click.echo(f"warning: the files record different shares of the sessions ({shares}); rates are mixed", err=True)
    if len(reading.keys) > 1:
        click.echo(
            f"warning: the hashes have {len(reading.keys)} different keys; equal prefixes and sessions of different "
            "keys are not found",
            err=True,
        )


def warn_of_error(error: RecordingError) -> None:
    """Print warnings about a recording that was read completely, although it cannot be used."""
    if isinstance(error, Unusable):
        warn(error.reading)


def warn_of_left_out(imported: Import) -> None:
    """Print warnings about the lines that an import left out."""
    _warn_of_lines(imported.left_out, imported.left_out_lines)


def _warn_of_lines(lines: Sequence[Damage], count: int) -> None:
    for each in lines[:_SHOWN]:
        click.echo(f"warning: {each.file}:{each.line}: left out: {each.reason}", err=True)
    if count > _SHOWN:
        click.echo(f"warning: {count:,} lines are left out, the first {_SHOWN} are above", err=True)


def warn_of_changes(changes: Changes) -> None:
    """Print warnings about what an exported trace lacks of its recording."""
    for what, count in (
        ("requests without a prompt, which are left out", changes.without_prompt),
        ("requests without a known output", changes.without_output),
        ("prompts with another length than recorded, because of their number of blocks", changes.adjusted),
    ):
        if count:
            click.echo(f"warning: {what}: {count:,}", err=True)
