"""Warnings on stderr about what a recording lacks: the first damaged lines, and how many there are."""

from typing import Final

import click

from dualmap_sim.recordings.reader import Reading

_SHOWN: Final = 5


def warn(reading: Reading) -> None:
    """Print warnings about a recording that was read completely."""
    for each in reading.damaged[:_SHOWN]:
        click.echo(f"warning: {each.file}:{each.line}: left out: {each.reason}", err=True)
    if reading.damaged_lines > _SHOWN:
        click.echo(f"warning: {reading.damaged_lines:,} lines are damaged and left out; --json lists them", err=True)
    if len(reading.samples) > 1:
        shares = ", ".join(f"{sample:g}" for sample in reading.samples)
        click.echo(f"warning: the files record different shares of the sessions ({shares}); rates are mixed", err=True)
    if len(reading.keys) > 1:
        click.echo(
            f"warning: the hashes have {len(reading.keys)} different keys; equal prefixes and sessions of different "
            "keys are not found",
            err=True,
        )
