"""The simulator's measurements for cells: a run at a rate, or the goodput.

Worker processes call these functions. A measurement that only one section needs is in that section's module.
"""

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any, Final

from bench.paper.cells import Figures

from dualmap_sim.experiment import Experiment, run_experiment
from dualmap_sim.goodput import NeverOverloaded, goodput
from dualmap_sim.records import Record
from dualmap_sim.summary import Summary, percentile

TOLERANCE: Final = 0.01


def run_figures(experiment: Experiment) -> Figures:
    """Run an experiment; return its summary with the mean TTFT."""
    outcome = run_experiment(experiment)
    counted = [each for each in outcome.records if int(each.arrival.request_id) >= experiment.warmup]
    return {**summary_figures(outcome.summary), "ttft_mean_s": mean_ttft_s(counted)}


def goodput_figures(experiment: Experiment, *, tolerance: float = TOLERANCE) -> Figures:
    """Search the rate at which 90 % meet the SLO; return the figures at this rate, null if every rate attains it."""
    try:
        found = goodput(experiment, tolerance=tolerance)
    except NeverOverloaded:
        return {"goodput_qps": None}
    figures: Figures = {"goodput_qps": found.requests_per_s, "runs": found.runs}
    summary = found.summary
    if summary is None:
        return figures
    return {**figures, "ttft_p999_s": summary.ttft_p999_s, "refused_share": summary.refused / summary.requests}


def summary_figures(summary: Summary) -> Figures:
    """Return a summary's figures in the format of the results."""
    return {
        "slo_attainment": summary.slo_attainment,
        "ttft_p50_s": summary.ttft_p50_s,
        "ttft_p90_s": summary.ttft_p90_s,
        "ttft_p99_s": summary.ttft_p99_s,
        "ttft_p999_s": summary.ttft_p999_s,
        "e2e_p50_s": summary.e2e_p50_s,
        "e2e_p90_s": summary.e2e_p90_s,
        "hit_rate": summary.hit_rate,
        "pending_cv": summary.pending_cv,
        "held_share": summary.held_share,
        "refused": summary.refused,
    }


def tpot_figures(records: Sequence[Record]) -> Figures:
    """Return the mean and percentiles of the time per output token after the first, over the served requests."""
    times_s = sorted(
        (each.finished_s - each.first_token_s) / (each.arrival.work.output_tokens - 1)
        for each in records
        if each.finished_s is not None and each.first_token_s is not None and each.arrival.work.output_tokens > 1
    )
    return {
        "tpot_mean_s": fmean(times_s) if times_s else float("nan"),
        "tpot_p50_s": percentile(times_s, 0.5),
        "tpot_p90_s": percentile(times_s, 0.9),
        "tpot_p99_s": percentile(times_s, 0.99),
    }


def mean_ttft_s(records: Sequence[Record]) -> float:
    """Return the mean TTFT of the served requests; NaN if there are none."""
    times_s = [each.ttft_s for each in records if each.ttft_s is not None]
    return fmean(times_s) if times_s else float("nan")


def timed(call: Callable[..., Any], times_s: list[float], clock: Callable[[], float]) -> Callable[..., Any]:
    """Return a function that calls ``call`` and appends the seconds of each call by ``clock`` to ``times_s``."""

    def measured(*arguments: Any, **named: Any) -> Any:
        began_s = clock()
        answer = call(*arguments, **named)
        times_s.append(clock() - began_s)
        return answer

    return measured
