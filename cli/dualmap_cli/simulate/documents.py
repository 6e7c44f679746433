"""The results as scripts read them: what ``--json`` prints (CONTRACT). What there is none of is null."""

import json
import math
from collections.abc import Sequence
from statistics import fmean

from dualmap_cli.simulate.runs import Run
from dualmap_sim.goodput import Goodput
from dualmap_sim.workloads.catalog import Workload


def runs_document(runs: Sequence[Run]) -> str:
    """Return what ``dualmap simulate --json`` prints."""
    return json.dumps({"runs": [_run(run) for run in runs]}, indent=2, allow_nan=False)


def goodputs_document(windows: Sequence[Workload], found: Sequence[tuple[str, Sequence[Goodput]]]) -> str:
    """Return what ``dualmap goodput --json`` prints; ``found`` has each policy's goodputs in the windows' order."""
    results = [
        {
            "policy": policy,
            "goodput_qps": fmean(each.requests_per_s for each in goodputs),
            "windows": [
                {"start": window.start, "seed": window.seed, "goodput_qps": each.requests_per_s}
                for window, each in zip(windows, goodputs, strict=True)
            ],
        }
        for policy, goodputs in found
    ]
    return json.dumps({"results": results}, indent=2, allow_nan=False)


def _run(run: Run) -> dict[str, object]:
    figures = run.summary
    return {
        "policy": run.experiment.policy,
        "qps": run.experiment.requests_per_s,
        "instances": run.experiment.instances,
        "requests": run.requests,
        "warmup": run.experiment.warmup,
        "ttft_p50_s": _number(figures.ttft_p50_s),
        "ttft_p90_s": _number(figures.ttft_p90_s),
        "ttft_p99_s": _number(figures.ttft_p99_s),
        "e2e_p50_s": _number(figures.e2e_p50_s),
        "e2e_p90_s": _number(figures.e2e_p90_s),
        "slo_attainment": figures.slo_attainment,
        "hit_rate": _number(figures.hit_rate),
        "pending_cv": _number(figures.pending_cv),
        "rejected": figures.refused,
        "wall_s": run.wall_s,
    }


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value
