"""The work of the worker processes: one run at one rate, or one search for the goodput."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from dualmap_sim.experiment import Experiment, Outcome, load_trace, run_experiment
from dualmap_sim.goodput import Goodput, NeverOverloaded, goodput
from dualmap_sim.notices import Losses, losses
from dualmap_sim.parallel import Report
from dualmap_sim.records import LoadSample
from dualmap_sim.summary import Summary

_REPORTS: Final = 100
"""Number of progress reports of a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The figures of one run. ``requests`` is the number of replayed requests; ``summary`` excludes the warm-up."""

    experiment: Experiment
    requests: int
    summary: Summary
    samples: tuple[LoadSample, ...]
    wall_s: float
    losses: Losses | None = None
    """What the run lost, if members got a notice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """A search for the goodput of an experiment at an attainment, to a relative tolerance."""

    experiment: Experiment
    attainment: float
    tolerance: float


Found = Sequence[tuple[str, Sequence[Goodput | NeverOverloaded]]]
"""The results of each policy, in the order of the windows."""


def rates(answers: Sequence[Goodput | NeverOverloaded]) -> list[float] | None:
    """Return the goodput of each of a policy's windows; None if a window has none, because then no mean exists."""
    found = [each.requests_per_s for each in answers if isinstance(each, Goodput)]
    return found if len(found) == len(answers) else None


def simulate(experiment: Experiment, report: Report, *, keep_samples: bool, lost_from_s: float | None = None) -> Run:
    """Run an experiment and report how many requests were answered since the last report.

    ``keep_samples`` keeps the load samples for charts. With ``lost_from_s``, the result has what was lost from then on.
    """
    began_s = time.perf_counter()
    requests = len(load_trace(experiment).requests)
    every = max(1, requests // _REPORTS)
    answered = 0

    def answer() -> None:
        nonlocal answered
        answered += 1
        if answered % every == 0:
            report(every)

    outcome = run_experiment(experiment, on_answer=answer)
    return Run(
        experiment=experiment,
        requests=requests,
        summary=outcome.summary,
        samples=outcome.samples if keep_samples else (),
        wall_s=time.perf_counter() - began_s,
        losses=losses_of(outcome, experiment, lost_from_s),
    )


def losses_of(outcome: Outcome, experiment: Experiment, from_s: float | None) -> Losses | None:
    """Return what a run lost from a time on; None without a time."""
    if from_s is None:
        return None
    return losses(outcome.records, from_s=from_s, block_tokens=experiment.engine.block_tokens)


def search(what: Search, report: Report) -> Goodput | NeverOverloaded:
    """Search for the goodput and report each rate before its run. Return NeverOverloaded if no rate overloads."""
    try:
        return goodput(what.experiment, attainment=what.attainment, tolerance=what.tolerance, on_try=report)
    except NeverOverloaded as endless:
        return endless
