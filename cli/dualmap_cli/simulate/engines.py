"""The engines that options select: a preset, the file of ``--engine``, ``--set`` and ``--slow``."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import click

from dualmap_cli.simulate.engine_options import PARAMETERS, changed
from dualmap_sim.experiment import member_ids
from dualmap_sim.oracles import ORACLES
from dualmap_sim.presets import PRESETS, EngineConfig, slowed

if TYPE_CHECKING:
    from dualmap_cli.engine_file import EngineFile

_SLOWEST: Final = 0.001
_PREFILL_SPEED: Final = ("o", "r", "a", "l")
_NEVER_FITTED: Final = ("cap", "pull")
"""No recording contains these. Recorded prompts are not cut, and the cut of others has a warning of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumed:
    """What the file of ``--engine`` does not say: parameters that are the preset's, and those without an interval.

    Both are empty without a file.
    """

    model: str
    absent: tuple[str, ...]
    unbounded: tuple[str, ...]

    @classmethod
    def of(cls, model: str, file: "EngineFile | None", parameters: Sequence[tuple[str, float]]) -> "Assumed":
        """Return what a file does not say, and ``parameters`` of ``--set`` do not say, either."""
        if file is None:
            return cls(model=model, absent=(), unbounded=())
        decodes = PRESETS[model].decode is not None
        stated = {name for name, _ in (*file.parameters, *parameters)}
        expected = [name for name, each in PARAMETERS.items() if name not in _NEVER_FITTED]
        return cls(
            model=model,
            absent=tuple(name for name in expected if name not in stated and (decodes or not PARAMETERS[name].decodes)),
            unbounded=tuple(name for name in file.unbounded if name not in dict(parameters)),
        )

    @property
    def prefill_speed(self) -> tuple[str, ...]:
        """The parameters of the prefill speed that are the preset's."""
        return tuple(name for name in self.absent if name in _PREFILL_SPEED)

    def text(self) -> str:
        """Return the parameters for people; empty if the file has all of them with their intervals."""
        parts = []
        if self.absent:
            parts.append(f"not in the fit, from preset {self.model}: {', '.join(self.absent)}")
        if self.unbounded:
            parts.append(f"no interval: {', '.join(self.unbounded)}")
        return "; ".join(parts)


def engines_of(
    model: str, file: "EngineFile | None", parameters: Sequence[tuple[str, float]]
) -> tuple[EngineConfig, Mapping[str, EngineConfig]]:
    """Return the engine of most members, and those of the members that differ in the file. Raises BadParameter."""
    engine, differing = PRESETS[model], dict[str, EngineConfig]()
    if file is not None:
        engine = changed(engine, file.parameters, hint="--engine")
        differing = {name: changed(engine, own, hint="--engine") for name, own in file.members.items()}
    return changed(engine, parameters), {name: changed(each, parameters) for name, each in differing.items()}


def check_equal(differing: Mapping[str, EngineConfig], policies: Sequence[str]) -> None:
    """Check that no bound is simulated with members that differ. Raises BadParameter."""
    if differing and any(policy in ORACLES for policy in policies):
        raise click.BadParameter("the bounds require equal engines; omit them in --policy", param_hint="--engine")


def differing_members(
    differing: Mapping[str, EngineConfig], recorded: Sequence[str], instances: int
) -> tuple[tuple[str, EngineConfig], ...]:
    """Return the members that differ: those of the ``recorded`` ones, else the first ones."""
    if recorded:
        return tuple((name, engine) for name, engine in differing.items() if name in recorded)
    return tuple(zip(member_ids(instances), differing.values(), strict=False))


def slow_ones(
    slow: Sequence[tuple[str, float]], engine: EngineConfig, members: Sequence[str], policies: Sequence[str]
) -> tuple[tuple[str, EngineConfig], ...]:
    """Return the members of ``--slow`` with their engines. Raises BadParameter."""
    for name, speed in slow:
        if name not in members:
            raise click.BadParameter(
                f"{name!r} is not accepted; give one of {members[0]} to {members[-1]}", param_hint="--slow"
            )
        if not _SLOWEST <= speed <= 1 / _SLOWEST:
            raise click.BadParameter(
                f"{name}={speed:g} is not accepted; give a factor from {_SLOWEST:g} to {1 / _SLOWEST:g}",
                param_hint="--slow",
            )
    for policy in policies:
        if slow and policy in ORACLES:
            raise click.BadParameter(
                f"the bound {policy} requires equal engines; omit --slow or {policy}", param_hint="--slow"
            )
    return tuple((name, slowed(engine, 1 / speed)) for name, speed in dict(slow).items())
