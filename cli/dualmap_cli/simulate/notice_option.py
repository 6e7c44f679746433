"""The option ``--notice``: members that are told to go at a time of the run, and must stop some seconds later."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import click

from dualmap.errors import PoolError
from dualmap.objects.fields import parse_duration
from dualmap_sim.experiment import Experiment, load_trace, pool_of
from dualmap_sim.notices import Notice, Reaction, pool_at
from dualmap_sim.oracles import ORACLES

_LONGEST_S: Final = 366 * 86_400.0
_HINT: Final = "--notice"
_SHOWN: Final = 10


def read_notices(_context: click.Context, _parameter: click.Parameter, value: tuple[str, ...]) -> tuple[Notice, ...]:
    """Read the values ``MEMBER=TIME+DURATION`` of a repeatable option. Raises BadParameter."""
    notices = tuple(_notice(each) for each in value)
    members = [name for notice in notices for name in notice.members]
    for name in members:
        if members.count(name) > 1:
            raise click.BadParameter(f"{name} has several notices; give one for each member")
    return notices


def with_notices(experiment: Experiment, notices: Sequence[Notice]) -> Experiment:
    """Return an experiment whose members get notices. Raises BadParameter if the experiment cannot have them."""
    if not notices:
        return experiment
    if experiment.policy in ORACLES:
        raise click.BadParameter(f"the bound {experiment.policy} has no members that go; omit it", param_hint=_HINT)
    if experiment.prefillers:
        raise click.BadParameter("members of a pool with a prefill pool stay; omit one option", param_hint=_HINT)
    pool = pool_of(experiment)
    lasts_s = load_trace(experiment).at_rate(experiment.requests_per_s).duration_s
    for notice in notices:
        if notice.at_s > lasts_s:
            raise click.BadParameter(
                f"{notice.at_s:g}s is not accepted; the last request arrives {lasts_s:.0f} s after the first, give an "
                "earlier time",
                param_hint=_HINT,
            )
        present = [member.id for member in pool_at(pool, experiment.events, notice.at_s).members]
        for name in notice.members:
            if name not in present:
                raise click.BadParameter(
                    f"{name!r} is no member at {notice.at_s:g} s; give {_some(present)}",
                    param_hint=_HINT,
                )
    events = experiment.events
    for notice in notices:
        events = notice.events(pool, Reaction.NOTICE, among=events)
    return replace(experiment, events=events)


def _some(members: Sequence[str]) -> str:
    """Return names of members that may get a notice, or of the first ones."""
    if not members:
        return "a time with members"
    more = ", ..." if len(members) > _SHOWN else ""
    return f"one of {', '.join(members[:_SHOWN])}{more}"


def _notice(text: str) -> Notice:
    name, found, when = text.partition("=")
    at, plus, lasts = when.partition("+")
    if not (name.strip() and found and plus):
        raise click.BadParameter(f"{text!r} is not accepted; give MEMBER=TIME+DURATION, such as qwen-2=10m+30s")
    return Notice(at_s=_seconds(text, at), notice_s=_seconds(text, lasts), members=frozenset({name.strip()}))


def _seconds(text: str, duration: str) -> float:
    try:
        return parse_duration(duration.strip(), "", low_s=0.0, high_s=_LONGEST_S)
    except PoolError as error:
        raise click.BadParameter(f"{text!r} is not accepted; {duration!r} should be {error.accepted}") from error
