"""The plan of a demo: workload, rate, engines, TTFT objective and clock speed.

All times are model seconds, the seconds of an engine with the ``7b`` preset. The engines run ``speed`` times as fast as
the model. Arrivals and the pool's durations are shortened by the same factor. Measured times are multiplied by the
factor.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Final

from dualmap.objects.fields import UNLIMITED
from dualmap.pools.pool import Routing
from dualmap_sim.presets import PRESETS, EngineConfig
from dualmap_sim.workloads.mooncake import read_mooncake
from dualmap_sim.workloads.statistics import decode_work_s, prefill_work_s
from dualmap_sim.workloads.synthetic import default_workload
from dualmap_sim.workloads.trace import Trace

MODEL: Final = "qwen"
PRESET: Final = "7b"
SLO_TTFT_S: Final = 5.0
"""The DualMap paper's objective for the first token (section 4)."""
HALF_REUSE_LOAD: Final = 1.0
"""The default load: the engines' utilisation if half of the reusable prompt tokens are reused.

At 1, a router that reuses less than half overloads the engines sooner or later, and a router that reuses more does not.
So routing decides whether the pool is overloaded. The value was chosen so that round robin is overloaded. The results
of other policies did not influence the value.
"""
_WINDOW_S_LEAST: Final = 5.0
"""The minimum of ``routing.prefix.window`` in the pool's schema."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The offered work as a share of the engines' capacity: without reuse, and with an ideal cache.

    The work includes prefill by the engine model, and decoding in the largest batches that fit into the KV memory.
    """

    without_reuse: float
    ideal_reuse: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One replay of the workload; with ``kv_events``, the routers follow the engines' KV events."""

    policy: str
    kv_events: bool = False

    @property
    def name(self) -> str:
        """The name of the run in results, and of its folder."""
        return f"{self.policy}+events" if self.kv_events else self.policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One demo. ``rate`` is requests per model second; ``speed`` is model seconds per wall-clock second.

    ``prompts_cut`` counts the prompts that were longer than an engine's maximum and were cut. With ``kv_events``, the
    engines publish KV events in every run, and another run of the last policy uses them. With ``record``, the routers
    of the last run record its requests.
    """

    engines: int
    routers: int
    policies: tuple[str, ...]
    trace: Trace
    prompts_cut: int
    rate: float
    load: Load
    speed: float
    seed: int | None
    out: Path
    kv_events: bool = False
    record: bool = False

    @property
    def recordings(self) -> tuple[Path, ...]:
        """The folders of the recordings, one for each router; empty without ``record``."""
        if not self.record:
            return ()
        names = [f"recording-{number}" for number in range(self.routers)] if self.routers > 1 else ["recording"]
        return tuple(self.out / name for name in names)

    @property
    def runs(self) -> tuple[Run, ...]:
        """The replays, in order."""
        runs = tuple(Run(policy=policy) for policy in self.policies)
        return (*runs, Run(policy=self.policies[-1], kv_events=True)) if self.kv_events else runs

    @property
    def engine(self) -> EngineConfig:
        """The engine model of every engine."""
        return PRESETS[PRESET]

    def wall_s(self, model_s: float) -> float:
        """Convert model seconds to wall-clock seconds."""
        return model_s / self.speed


def make_plan(
    *,
    engines: int,
    routers: int,
    policies: tuple[str, ...],
    trace_file: Path | None,
    requests: int,
    rate: float | None,
    speed: float,
    seed: int,
    out: Path,
    kv_events: bool = False,
    record: bool = False,
) -> Plan:
    """Read or generate the workload and set its rate, by default for HALF_REUSE_LOAD. Raises TraceError."""
    engine = PRESETS[PRESET]
    if trace_file is None:
        trace = default_workload(requests, seed=seed)
    else:
        trace = read_mooncake(trace_file, limit=requests)
    prompts_cut = trace.longer_than(engine.input_tokens_max)
    trace = trace.capped(engine.input_tokens_max)
    decode_s = decode_work_s(trace, engine)
    share_per_rate = [
        (prefill_work_s(trace, engine.prefill, ideally_cached=cached) + decode_s) / len(trace.requests) / engines
        for cached in (False, True)
    ]
    if rate is None:
        rate = HALF_REUSE_LOAD / (sum(share_per_rate) / 2)
    return Plan(
        engines=engines,
        routers=routers,
        policies=policies,
        trace=trace.at_rate(rate),
        prompts_cut=prompts_cut,
        rate=rate,
        load=Load(without_reuse=rate * share_per_rate[0], ideal_reuse=rate * share_per_rate[1]),
        speed=speed,
        seed=seed if trace_file is None else None,
        out=out,
        kv_events=kv_events,
        record=record,
    )


def pool_document(
    plan: Plan, policy: str, engines: Mapping[str, str], *, renderer: str | None = None
) -> dict[str, object]:
    """Return the InferencePool of a run; ``engines`` maps member ids to ``IP:PORT``.

    With ``renderer``, the ``IP:PORT`` of an engine that renders requests, the routers follow the KV events.
    Durations that depend on the engines are divided by the speed, down to the schema's minimum.
    """
    members = [
        {"id": name, "address": address.rpartition(":")[0], "port": int(address.rpartition(":")[2])}
        for name, address in engines.items()
    ]
    defaults = Routing()
    return {
        "apiVersion": "serving.dualmap.dev/v1alpha1",
        "kind": "InferencePool",
        "metadata": {"name": MODEL, "namespace": "demo"},
        "spec": {
            "model": {"name": MODEL},
            "engine": {
                "prefillTokensPerSecond": plan.engine.prefill.tokens_per_s * plan.speed,
                "cacheTokens": plan.engine.cache_tokens,
                "kvTokens": plan.engine.kv_memory_tokens,
                **({} if renderer is None else _kv_events(renderer)),
            },
            "slo": {"ttft": _milliseconds(plan.wall_s(SLO_TTFT_S))},
            "routing": {
                "policy": policy,
                "prefix": {"window": _milliseconds(max(_WINDOW_S_LEAST, plan.wall_s(defaults.prefix.window_s)))},
                "queue": {
                    "dispatchWindow": _window(plan, defaults.queue.dispatch_window_s),
                    "maxWait": _milliseconds(plan.wall_s(defaults.queue.max_wait_s)),
                },
                "rebalance": {"decodeStall": _milliseconds(plan.wall_s(defaults.rebalance.decode_stall_s))},
            },
        },
        "status": {"ring": {"version": 1, "members": members}},
    }


def _kv_events(renderer: str) -> dict[str, object]:
    return {"tokenizer": {"source": "Renderer", "url": f"http://{renderer}"}, "kvEvents": {"enabled": True}}


def _window(plan: Plan, window_s: float) -> str:
    return UNLIMITED if window_s == inf else _milliseconds(plan.wall_s(window_s))


def _milliseconds(seconds: float) -> str:
    return f"{round(seconds * 1000)}ms"
