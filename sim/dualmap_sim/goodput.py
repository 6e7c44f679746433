"""Goodput: the highest rate at which a share of the requests gets the first token within the SLO.

Section 5.1 of the DualMap paper defines this measure. Attainment falls as the rate rises, but not monotonically: at a
slightly different rate, different requests coincide. So attainment may cross the required share at several rates. The
search returns a rate that attains the share, while the next rate, higher by the factor 1 + ``tolerance``, does not. All
searches use the same grid of rates, so that policies are compared at equal rates. Several windows and seeds show the
random variation.

``experiment`` runs each rate, and ``parallel`` runs several searches at once.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import log
from typing import Final

from dualmap_sim.experiment import Experiment, load_trace, run_experiment
from dualmap_sim.summary import Summary
from dualmap_sim.workloads.statistics import decode_work_s, prefill_work_s

_FIRST_STEP: Final = 1.2
"""Grid points of the first step from the initial guess. Each further step is twice as long."""
_SPARSEST: Final = 1 / 200
"""The lowest rate to try, as a share of the ideal capacity. At this rate requests practically never overlap."""
_DENSEST_SLO_SHARE: Final = 0.01
"""At the highest rate to try, all requests arrive within this share of the SLO: practically at once."""


class NeverOverloaded(Exception):
    """Every rate attains the share; the message explains the error and its remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """The result of a search: the rate, the number of runs, and the bracket around the rate.

    The upper end of ``bracket`` is the next rate of the grid, which did not attain the share. The rate is 0 if even
    requests that never overlap do not attain the share. ``summary`` has the figures of the run at the rate, without a
    CV, which needs samples of the load. ``summary`` is None if the rate is 0.
    """

    requests_per_s: float
    runs: int
    bracket: tuple[float, float]
    summary: Summary | None = field(default=None, compare=False)


def goodput(
    experiment: Experiment,
    *,
    attainment: float = 0.9,
    tolerance: float = 0.01,
    guess: float | None = None,
    on_try: Callable[[float], None] | None = None,
) -> Goodput:
    """Return the highest rate at which ``attainment`` of the counted requests meet the SLO, to ``tolerance``.

    The search ignores the experiment's own rate. The search begins at ``guess``, by default the capacity with an ideal
    cache. The search calls ``on_try`` with each rate before its run. Raises NeverOverloaded and the errors of
    ``run_experiment``.
    """
    search = _Search(experiment, attainment=attainment, tolerance=tolerance, on_try=on_try)
    good, bad = search.bracket(ideal_capacity(experiment) if guess is None else guess)
    if good is None:
        return Goodput(requests_per_s=0.0, runs=search.runs, bracket=(0.0, search.rate(bad)))
    good = highest_step(search.attains, good, bad)
    rate = search.rate(good)
    return Goodput(
        requests_per_s=rate, runs=search.runs, bracket=(rate, search.rate(good + 1)), summary=search.summary(good)
    )


def highest_step(attains: Callable[[int], bool], good: int, bad: int) -> int:
    """Return a grid point that attains the share, while the next one does not.

    ``good`` is a grid point that attains the share, and ``bad`` a higher one that does not.
    """
    while bad - good > 1:
        middle = (good + bad) // 2
        if attains(middle):
            good = middle
        else:
            bad = middle
    return good


def ideal_capacity(experiment: Experiment) -> float:
    """Return the requests per second that the engines could compute if they reused every reusable token."""
    trace, engine = load_trace(experiment), experiment.engine
    work_s = prefill_work_s(trace, engine.prefill, ideally_cached=True) + decode_work_s(trace, engine)
    return experiment.instances * len(trace.requests) / work_s


class _Search:
    """A search over the points of a geometric grid, ``(1 + tolerance) ** step``. Each point runs at most once."""

    def __init__(
        self, experiment: Experiment, *, attainment: float, tolerance: float, on_try: Callable[[float], None] | None
    ) -> None:
        self._experiment = replace(experiment, sample_s=None)
        self._attainment = attainment
        self._ratio = 1 + tolerance
        self._on_try = on_try
        # The figures of each run that attained the share, None for the other runs.
        self._tried: dict[int, Summary | None] = {}

    @property
    def runs(self) -> int:
        """The number of runs so far."""
        return len(self._tried)

    def rate(self, step: int) -> float:
        """Return the requests per second at a grid point."""
        return float(self._ratio**step)

    def attains(self, step: int) -> bool:
        """Return whether the share is attained at a grid point."""
        if step not in self._tried:
            rate = self.rate(step)
            if self._on_try is not None:
                self._on_try(rate)
            outcome = run_experiment(replace(self._experiment, requests_per_s=rate), stop_below=self._attainment)
            attained = not outcome.gave_up and outcome.summary.slo_attainment >= self._attainment
            self._tried[step] = outcome.summary if attained else None
        return self._tried[step] is not None

    def summary(self, step: int) -> Summary | None:
        """Return the figures of a tried grid point, None if the point did not attain the share."""
        return self._tried[step]

    def bracket(self, guess: float) -> tuple[int | None, int]:
        """Return a grid point that attains the share, or None, and a higher grid point that does not."""
        experiment, requests = self._experiment, len(load_trace(self._experiment).requests)
        lowest = self._step(min(guess, ideal_capacity(experiment)) * _SPARSEST)
        highest = self._step(max(guess, requests / (experiment.slo_ttft_s * _DENSEST_SLO_SHARE)))
        here, stride = self._step(guess), max(1, self._step(_FIRST_STEP))
        upwards = self.attains(here)
        while lowest <= here <= highest:
            there = here + stride if upwards else here - stride
            if self.attains(there) is not upwards:
                return (here, there) if upwards else (there, here)
            here, stride = there, 2 * stride
        if not upwards:
            return None, here
        raise NeverOverloaded(
            f"{experiment.policy}: {self._attainment:.0%} of the {requests} requests meet the SLO of "
            f"{experiment.slo_ttft_s:g} s at every tested rate up to {self.rate(here):.3g} requests/s; "
            "give more requests or fewer instances"
        )

    def _step(self, rate: float) -> int:
        return round(log(rate) / log(self._ratio))
