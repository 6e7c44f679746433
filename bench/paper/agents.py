"""Measures EAR's closed loop of agents (Elastic Affinity Routing): the sections ``sessions`` and ``ear``.

An agent's next turn starts when the last turn ends. The engines may pull a session's KV from each other.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from math import inf, nan
from statistics import fmean, median
from types import MappingProxyType
from typing import ClassVar, Final
from unittest.mock import patch

from bench.paper.cells import Figures
from bench.paper.measures import mean_ttft_s, summary_figures, tpot_figures
from bench.paper.settings import as_shipped

from dualmap.policies.cache_and_load.ear import Ear
from dualmap.policies.registry import POLICIES
from dualmap.policies.situation import Choice, Situation
from dualmap.pools.pool import Routing, Session, SessionMigration
from dualmap_sim.engine import Engine, EngineRequest
from dualmap_sim.experiment import Experiment, Outcome, load_trace, run_experiment
from dualmap_sim.presets import PRESETS
from dualmap_sim.records import Record
from dualmap_sim.summary import percentile
from dualmap_sim.workloads.agentic import agentic_workload
from dualmap_sim.workloads.catalog import WORKLOADS, Workload

PULL_TOKENS_PER_S: Final = 100_000.0
"""The speed of a link of 10 GB/s, with 3.3 GB of KV for 33,600 tokens (EAR)."""
AGENT: Final = replace(PRESETS["agent"], pull_tokens_per_s=PULL_TOKENS_PER_S)
"""EAR's engine with this link."""
WARMUP: Final = 200
INSTANCES: Final = 8
BEYOND: Final = 5.5
"""Nominal requests per second slightly above the capacity with one unlimited shared cache."""
EARLY_S: Final = 0.5
"""A threshold that moves sessions. At the SLO, the threshold of the policy ``ear``, hardly any session moves."""
COOL_S: Final = 30.0


def closed_loop_figures(experiment: Experiment, outcome: Outcome) -> Figures:
    """Return a closed loop's summary, its amplification, and the TTFT p90 of the instances."""
    trace = load_trace(experiment).at_rate(experiment.requests_per_s)
    nominal_s = sorted(each.arrival_s for each in trace.requests)
    counted = [each for each in outcome.records if int(each.arrival.request_id) >= experiment.warmup]
    ended_s = sorted(each.finished_s for each in outcome.records if each.finished_s is not None)
    tokens = sum(each.arrival.work.prompt_tokens for each in counted)
    workers_s = _worker_p90_s(counted)
    return {
        **summary_figures(outcome.summary),
        "ttft_mean_s": mean_ttft_s(counted),
        "turn_mean_s": fmean(each.finished_s - each.arrival.at_s for each in counted if each.finished_s is not None),
        "amplification": ended_s[-1] / trace.duration_s,
        "amplification_90": percentile(ended_s, 0.9) / percentile(nominal_s, 0.9),
        "pulled_share": sum(each.pulled_tokens for each in counted) / tokens,
        "worker_median_p90_s": median(workers_s) if workers_s else nan,
        "worker_max_p90_s": max(workers_s, default=nan),
    }


def _worker_p90_s(records: Sequence[Record]) -> list[float]:
    """Return the TTFT p90 of every instance that served requests."""
    times_s = defaultdict(list)
    for record in records:
        if record.ttft_s is not None and record.endpoint is not None:
            times_s[record.endpoint].append(record.ttft_s)
    return [percentile(sorted(each), 0.9) for each in times_s.values()]


class EarWith(Ear):
    """The published rule with another threshold, in seconds of pending prefill."""

    name: ClassVar[str] = "ear_with"

    def __init__(self, hot_s: float) -> None:
        self._hot_s = hot_s

    def choose(self, situation: Situation) -> Choice:
        """Return EAR's choice. EAR compares the pending prefill with the SLO, so the SLO is the threshold."""
        changed = copy(situation)
        changed.slo_ttft_s = self._hot_s
        return super().choose(changed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The settings of a run. ``hot_s`` and ``cool_s`` apply to the policy ``EarWith``. ``zipf`` None: EAR's skew."""

    policy: str = EarWith.name
    rate: float = BEYOND
    hot_s: float = EARLY_S
    cool_s: float = COOL_S
    moves: bool = True
    zipf: float | None = None
    memory: int = AGENT.kv_memory_tokens
    decoders: int = 0

    @property
    def name(self) -> str:
        """The differences from the default settings, as a name."""
        shown = [f"{self.rate:g}/s", self.policy]
        if self.policy == EarWith.name:
            shown.append(f"T_hot {self.hot_s:g} T_cool {self.cool_s:g}")
        shown += [] if self.moves else ["no moves"]
        shown += [] if self.zipf is None else [f"zipf {self.zipf:g}"]
        shown += [] if self.memory == AGENT.kv_memory_tokens else [f"memory {self.memory}"]
        shown += [f"{INSTANCES - self.decoders}P+{self.decoders}D"] if self.decoders else []
        return " ".join(shown)


def agents(run: Run, requests: int, seed: int) -> Figures:
    """Run a closed loop; return its figures, TPOT, moves of sessions, and the use of the decode side's memory."""
    experiment = as_shipped(
        Experiment(
            workload=Workload(name=_workload_name(run.zipf), requests=requests, seed=seed),
            engine=replace(AGENT, kv_memory_tokens=run.memory),
            policy=run.policy,
            requests_per_s=run.rate,
            instances=INSTANCES,
            decoders=run.decoders,
            warmup=WARMUP,
            kv_moves=run.moves,
            routing=Routing(session=Session(migration=SessionMigration(cooldown_s=run.cool_s))),
        )
    )
    with known(run.hot_s), _workload(run.zipf):
        outcome = run_experiment(experiment)
        figures = {**closed_loop_figures(experiment, outcome), **tpot_figures(outcome.records)}
    figures["served_per_s"] = len(outcome.records) / max(each.finished_s or 0.0 for each in outcome.records)
    figures["busiest_ratio"] = _busiest_ratio(outcome.records)
    figures["moved_share"] = outcome.summary.rules.get("session-move", 0) / outcome.summary.requests
    if not run.decoders:
        return figures
    served = [each for each in outcome.records if each.finished_s is not None]
    waits_s = [each.first_token_s - each.prefilled_s for each in served if each.first_token_s and each.prefilled_s]
    held = sum(
        (each.arrival.work.prompt_tokens + each.arrival.work.output_tokens) * (each.finished_s - each.first_token_s)
        for each in served
        if each.finished_s is not None and each.first_token_s is not None
    )
    last_s = max(each.arrival.at_s for each in served)
    waits_s.sort()
    return {
        **figures,
        "decode_memory_share": held / (run.decoders * run.memory * last_s),
        "decode_wait_p50_s": waits_s[len(waits_s) // 2],
    }


def _busiest_ratio(records: Sequence[Record]) -> float:
    """Return how many times the mean of the instances' computed prompt tokens the busiest instance computes."""
    computed = Counter[str]()
    for record in records:
        if record.endpoint is not None and record.first_token_s is not None:
            computed[record.endpoint] += record.arrival.work.prompt_tokens - record.cached_tokens - record.pulled_tokens
    return max(computed.values()) * len(computed) / computed.total()


def interference(chunk_tokens: int | None) -> Figures:
    """Return the time between two tokens of a decode, alone and beside a prefill of 8192 tokens."""
    engine = Engine(replace(AGENT, chunk_tokens=chunk_tokens))
    engine.submit(0.0, EngineRequest(request_id="decodes", prompt_tokens=1000, output_tokens=200))
    tokens_s: list[float] = []
    joined_s = inf
    while (due_s := engine.next_step_s()) is not None:
        before = engine.decode_steps
        if engine.advance(due_s) and joined_s < inf:
            break
        if engine.decode_steps > before:
            tokens_s.append(due_s)
        if len(tokens_s) == 10:
            joined_s = due_s
            engine.submit(due_s, EngineRequest(request_id="prefills", prompt_tokens=8192, output_tokens=1))
    alone_s = tokens_s[9] - tokens_s[8]
    # The decode continues after the prefill, or in each of its pieces.
    beside = [each for each in tokens_s if each > joined_s]
    end_s = engine.next_step_s() or engine.now_s
    gap_s = (engine.now_s - joined_s) / len(beside) if beside else end_s - joined_s
    return {"alone_s": alone_s, "beside_s": gap_s}


def known(hot_s: float) -> AbstractContextManager[object]:
    """Register the policy with core for the duration of the context, because core selects policies by name."""
    return patch("dualmap.chooser.POLICIES", MappingProxyType({**POLICIES, EarWith.name: EarWith(hot_s)}))


def _workload(zipf: float | None) -> AbstractContextManager[object]:
    """Register the workload with a skew for the duration of the context, because a workload is selected by name."""
    skewed = {_workload_name(zipf): partial(agentic_workload, zipf=zipf)} if zipf is not None else {}
    return patch("dualmap_sim.workloads.catalog.WORKLOADS", MappingProxyType({**WORKLOADS, **skewed}))


def _workload_name(zipf: float | None) -> str:
    return "agentic" if zipf is None else f"agentic with Zipf's exponent {zipf:g}"
