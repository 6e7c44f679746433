"""The results as JSON documents for ``--json``. A missing figure is null."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from statistics import fmean
from typing import Final

from dualmap_cli.simulate.as_it_was import AsItWas
from dualmap_cli.simulate.comparison import Figure
from dualmap_cli.simulate.plan import Plan
from dualmap_cli.simulate.runs import Found, Run, rates
from dualmap_sim.events import PoolChange
from dualmap_sim.experiment import load_trace
from dualmap_sim.goodput import Goodput
from dualmap_sim.notices import Losses

AS_IT_WAS: Final = ("ttft_p50_s", "ttft_p90_s", "hit_rate", "slo_attainment")
"""The figures of a recording beside those of its simulation."""


def runs_document(runs: Sequence[Run], was: AsItWas | None = None) -> str:
    """Return the JSON document of ``dualmap simulate --json``, with ``as_it_was`` for a recording."""
    document: dict[str, object] = {"runs": [_run(run) for run in runs]}
    if was is not None:
        document["as_it_was"] = _as_it_was(was)
    return json.dumps(document, indent=2, allow_nan=False)


def _as_it_was(was: AsItWas) -> dict[str, object]:
    return {
        **{name: _figure(getattr(was, name)) for name in AS_IT_WAS},
        "window_s": was.windows.window_s,
        "windows": [
            {
                "start_s": each.start_s,
                "requests": each.requests,
                "slo_attainment": _figure(each.slo_attainment),
                "differs": each.differs,
            }
            for each in was.windows.shares
        ],
        "pool_changes": sum(isinstance(event, PoolChange) for event in was.experiment.events),
        "not_repeated": [{"what": each.what, "at_s": each.recorded_s} for each in was.unrepeated],
        "believable": was.believable,
        "reason": was.reason,
        "losses": _losses(was.losses),
        "assumed": list(was.assumed),
    }


def _figure(figure: Figure) -> dict[str, float | None]:
    return {"measured": _number(figure.measured), "simulated": _number(figure.simulated)}


def goodputs_document(plan: Plan, attainment: float, found: Found, was: AsItWas | None = None) -> str:
    """Return the JSON document of ``dualmap goodput --json``, with ``as_it_was`` for a recording."""
    results = [
        {
            "policy": policy,
            "goodput_qps": None if (own := rates(answers)) is None else fmean(own),
            "instances": plan.base.instances,
            "model": plan.model,
            "slo_s": plan.base.slo_ttft_s,
            "attainment": attainment,
            "windows": [
                {
                    "start": window.start,
                    "seed": window.seed,
                    "requests": len(load_trace(replace(plan.base, workload=window)).requests),
                    "goodput_qps": each.requests_per_s if isinstance(each, Goodput) else None,
                }
                for window, each in zip(plan.windows, answers, strict=True)
            ],
        }
        for policy, answers in found
    ]
    document: dict[str, object] = {"results": results}
    if was is not None:
        document["as_it_was"] = _as_it_was(was)
    return json.dumps(document, indent=2, allow_nan=False)


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
        "stale_hit_rate": _number(figures.stale_rate),
        "pending_cv": _number(figures.pending_cv),
        "rejected": figures.refused,
        "losses": _losses(run.losses),
        "wall_s": run.wall_s,
    }


def _losses(losses: Losses | None) -> dict[str, int] | None:
    return None if losses is None else asdict(losses)


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value
