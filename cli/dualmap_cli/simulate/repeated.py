"""A recording as it was, for the commands that take ``--recording``: warnings first, then its figures."""

import click

from dualmap_cli.simulate.as_it_was import AsItWas, as_it_was_warnings, run_as_it_was, trust_text, unrepeated_text
from dualmap_cli.simulate.plan import Plan
from dualmap_cli.simulate.tables import as_it_was_table, show, windows_table


def repeated(plan: Plan, *, lost_from_s: float | None = None) -> AsItWas | None:
    """Simulate the recording of a plan as it was; None without a recording, or for a single time.

    Prints warnings on stderr: what the engine's file does not say, and why the simulation may not be believed. With
    ``lost_from_s``, the result has what was lost from then on.
    """
    if assumed := plan.assumed.text():
        click.echo(f"warning: {assumed}", err=True)
    if plan.traffic is None:
        return None
    was = run_as_it_was(plan, lost_from_s=lost_from_s)
    for warning in as_it_was_warnings(was):
        click.echo(f"warning: {warning}", err=True)
    return was


def show_as_it_was(was: AsItWas) -> None:
    """Print a recording's figures beside those of its simulation, and whether the simulation may be believed."""
    show(as_it_was_table(was))
    if was.windows.shares:
        show(windows_table(was.windows))
    click.echo(trust_text(was))
    if was.unrepeated:
        click.echo(f"It does not repeat: {unrepeated_text(was.unrepeated)}.")
