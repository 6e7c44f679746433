"""Defines the measurements: the load shapes, the scalers, and the fixed fleets for comparison."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

from bench.paper.settings import CONVERSATION, TOOL_AGENT

from dualmap_sim.autoscaling.hpa import HpaSpec
from dualmap_sim.workloads.pacing import Phase, wave

SLO_S: Final = 5.0
WARMUP_S: Final = 600.0
START_S: Final = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The load over time, as multiples of the trace's recorded rate.

    ``first`` is the number of instances at the start. ``highest`` is the highest rate. ``rises_s`` is the time at which
    the load rises suddenly to ``highest``, or None.
    """

    says: str
    phases: tuple[Phase, ...]
    first: int
    highest: float
    rises_s: float | None = None

    @property
    def lasts_s(self) -> float:
        """The shape's duration in seconds."""
        return sum(phase.seconds for phase in self.phases)


def phases(*minutes_and_rates: tuple[float, float]) -> tuple[Phase, ...]:
    """Return phases, each with its duration in minutes and its rate."""
    return tuple(Phase(seconds=60 * minutes, rate=rate) for minutes, rate in minutes_and_rates)


SHAPES: Final[Mapping[str, Shape]] = MappingProxyType(
    {
        "steady": Shape(
            says="an hour at the trace's own rate (3.3 requests a second)",
            phases=phases((60, 1.0)),
            first=9,
            highest=1.0,
        ),
        "step": Shape(
            says="a quarter of an hour at 0.6 of that rate, 20 minutes at 1.5 of it, 25 minutes at 0.6",
            phases=phases((15, 0.6), (20, 1.5), (25, 0.6)),
            first=7,
            highest=1.5,
            rises_s=15 * 60.0,
        ),
        "burst": Shape(
            says="a quarter of an hour at 0.6, five minutes at 1.5, 25 minutes at 0.6",
            phases=phases((15, 0.6), (5, 1.5), (25, 0.6)),
            first=7,
            highest=1.5,
            rises_s=15 * 60.0,
        ),
        "idle": Shape(
            says="ten minutes of nothing, 20 minutes at 1, 25 minutes of nothing",
            phases=phases((10, 0.0), (20, 1.0), (25, 0.0)),
            first=2,
            highest=1.0,
            rises_s=10 * 60.0,
        ),
        "wave": Shape(
            says="a day in 75 minutes, from 0.3 to 1.5 and back",
            phases=wave(period_s=75 * 60.0, low=0.3, high=1.5),
            first=4,
            highest=1.5,
        ),
    }
)
ENOUGH: Final[Mapping[float, int]] = MappingProxyType({1.0: 9, 1.5: 12})
"""The smallest fixed fleet that serves 99 % of the requests within the SLO, by rate, from the table of fixed fleets."""
SIZES: Final[Mapping[float, tuple[int, ...]]] = MappingProxyType({1.0: (8, 9), 1.5: (11, 12)})
MANIFEST: Final = HpaSpec()
HASTY: Final = replace(MANIFEST, down=replace(MANIFEST.down, stabilization_s=300.0))
TARGETS: Final = (12.0, 8.0)
SLO: Final = "SLO"
FIXED_PEAK: Final = "fixed, for the highest rate"
FIXED_MEAN: Final = "fixed, for about the same cost"
MEAN: Final = 10
SLO_HASTY: Final = "SLO, down after 5 min"
SLO_ROUTERS: Final = "SLO, 4 routers with an owner"


def queue(target: float) -> str:
    """Return the name of a scaler with this target of requests per replica."""
    return f"queue, {target:g} a replica"


SCALERS: Final = (SLO, SLO_HASTY, *(queue(target) for target in TARGETS), FIXED_PEAK, FIXED_MEAN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """The extent of a run and its workload."""

    quick: bool
    trace: Path

    @property
    def workload(self) -> str:
        """The Conversation trace, or Tool&Agent if the trace is missing."""
        return CONVERSATION if self.trace.exists() else TOOL_AGENT

    def scalers(self, shape: str, seed: int) -> Sequence[str]:
        """The scalers that run under a shape with a seed. Scalers with little variation run only once."""
        once = (SLO_HASTY, FIXED_MEAN)
        return [each for each in SCALERS if each not in once or (shape == "step" and seed == 0)]

    def sizes(self, seed: int) -> Sequence[tuple[float, int]]:
        """The fixed fleets to measure, by rate."""
        return () if self.quick or seed else [(rate, size) for rate, of in SIZES.items() for size in of]

    @property
    def shapes(self) -> Sequence[str]:
        """The shapes to measure."""
        return ("burst",) if self.quick else tuple(SHAPES)

    @property
    def seeds(self) -> Sequence[int]:
        """The seeds. Each seed determines the first request of a run."""
        return (0,) if self.quick else (0, 1)

    @property
    def routers(self) -> Sequence[tuple[str, int]]:
        """The shapes and seeds that run with several routers."""
        return () if self.quick else (("step", 0),)
