"""A capacity plan: sizes with their attainment, what a larger cache, autoscaling and other settings would change."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil
from random import Random
from typing import Final

from dualmap_sim.experiment import Experiment, load_trace, run_experiment
from dualmap_sim.planning.sizes import Unattainable, least_instances
from dualmap_sim.presets import EngineConfig
from dualmap_sim.records import Record
from dualmap_sim.workloads.statistics import decode_work_s, ideal_cached_tokens, prefill_work_s

_DECODE_MARGIN: Final = 8
"""An assumption: only a part of the decode work delays first tokens."""
_PARTS: Final = 20
"""A run is resampled in this many parts, because neighbouring requests share their fate."""
_RESAMPLES: Final = 400
_INTERVAL: Final = (0.05, 0.95)
_SEED: Final = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The share of requests within the SLO, with the interval of the engine's fit and of the workload's parts."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A number of instances and what it attains."""

    instances: int
    slo_attainment: Share


@dataclass(frozen=True, slots=True, kw_only=True)
class Engines:
    """The engine as fitted, and the slowest and the fastest one that the fit allows."""

    usual: EngineConfig
    slowest: EngineConfig
    fastest: EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A changed field of the pool, and its ``gain`` in attainment with the same instances. Values are shown as text."""

    field: str
    now: str
    proposed: str
    gain: float


class Capacity:
    """Simulations of a workload at different sizes. ``base`` has the workload at its rate, the pool and the SLO."""

    def __init__(
        self, base: Experiment, engines: Engines, target: float, *, on_run: Callable[[], None] = lambda: None
    ) -> None:
        self._base = replace(base, sample_s=None)
        self._engines = engines
        self._target = target
        self._on_run = on_run
        self._shares: dict[Experiment, tuple[bool, ...]] = {}

    def least(self, *, first: int | None = None, engine: EngineConfig | None = None) -> int:
        """Return the least number of instances with the usual engine, or with ``engine``. Raises Unattainable."""
        base = replace(self._base, engine=engine or self._engines.usual)
        return least_instances(
            lambda instances: self._attained(replace(base, instances=instances)),
            self._target,
            first=first or self._lower_bound(base.engine),
        )

    def least_range(self, instances: int) -> tuple[int, int | None]:
        """Return the least numbers of instances with the fastest and with the slowest engine.

        The second is None if no number of the slowest ones suffices. Raises Unattainable.
        """
        fastest = min(instances, self.least(first=max(1, instances // 2), engine=self._engines.fastest))
        try:
            return fastest, max(instances, self.least(first=instances, engine=self._engines.slowest))
        except Unattainable:
            return fastest, None

    def size(self, instances: int) -> Size:
        """Return what a number of instances attains."""
        within = self._within(replace(self._base, engine=self._engines.usual, instances=instances))
        value = sum(within) / len(within)
        low, high = _interval(within)
        slow, fast = (
            self._attained(replace(self._base, engine=engine, instances=instances))
            for engine in (self._engines.slowest, self._engines.fastest)
        )
        return Size(
            instances=instances,
            slo_attainment=Share(
                value=value,
                low=max(0.0, min(value, slow) - (value - low)),
                high=min(1.0, max(value, fast) + (high - value)),
            ),
        )

    def with_double_cache(self, instances: int) -> int:
        """Return the least number of instances up to ``instances`` if their caches were twice as large."""
        usual = self._engines.usual
        doubled = replace(self._base, engine=replace(usual, cache_tokens=2 * usual.cache_tokens))
        while instances > 1 and self._attained(replace(doubled, instances=instances - 1)) >= self._target:
            instances -= 1
        return instances

    def gain(self, changed: Experiment, instances: int) -> float | None:
        """Return how much more ``changed`` attains than the base with the same instances and engine.

        The result is None if the gain may be chance: the interval of the difference contains 0.
        """
        engine = self._engines.usual
        before = self._within(replace(self._base, instances=instances, engine=engine))
        after = self._within(replace(changed, instances=instances, engine=engine, sample_s=None))
        gains = [new - old for new, old in zip(after, before, strict=True)]
        low, _ = _interval(gains)
        return sum(gains) / len(gains) if low > 0 else None

    def busy_share(self, instances: int, *, windows: int) -> float:
        """Return the instance hours of an autoscaler without delay, as a share of those of ``instances``.

        In each of ``windows`` equal windows of time, the autoscaler runs the share of instances that the work of the
        window's requests is of the busiest window's work: the time of their prefills without a cache.
        """
        trace, engine = load_trace(self._base), self._engines.usual
        if not trace.duration_s:
            return 1.0
        start_s, width_s = trace.requests[0].arrival_s, trace.duration_s / windows
        work_s = [0.0] * windows
        for request in trace.requests:
            window = min(windows - 1, int((request.arrival_s - start_s) / width_s))
            work_s[window] += engine.prefill_s(new_tokens=request.input_tokens, cached_tokens=0, pulled_tokens=0)
        busiest_s = max(work_s)
        return sum(max(1, ceil(instances * each / busiest_s)) for each in work_s) / (instances * windows)

    def check(self) -> None:
        """Check that an instance alone could serve enough requests within the SLO. Raises Unattainable."""
        trace, engine = load_trace(self._base), self._engines.usual
        cached_tokens = ideal_cached_tokens(trace)
        counted = range(self._base.warmup, len(trace.requests))
        within = 0
        for number in counted:
            tokens, cached = trace.requests[number].input_tokens, cached_tokens[number]
            seconds = engine.prefill_s(new_tokens=max(1, tokens - cached), cached_tokens=cached, pulled_tokens=0)
            within += seconds <= self._base.slo_ttft_s
        if within < self._target * len(counted):
            raise Unattainable(share=within / len(counted), instances=None)

    def _lower_bound(self, engine: EngineConfig) -> int:
        """Return a number of instances that hardly suffices: every possible cache hit occurs, and no time is lost.

        The search begins with this number, which therefore changes only how long the search takes.
        """
        trace = load_trace(self._base)
        prefill_s = prefill_work_s(trace, engine.prefill, ideally_cached=True)
        decode_s = decode_work_s(trace, engine) / _DECODE_MARGIN
        return max(1, int((prefill_s + decode_s) / max(trace.duration_s, 1e-9)))

    def _attained(self, experiment: Experiment) -> float:
        within = self._within(experiment)
        return sum(within) / len(within)

    def _within(self, experiment: Experiment) -> tuple[bool, ...]:
        """Return whether each counted request got its first token within the SLO, in order of arrival."""
        found = self._shares.get(experiment)
        if found is None:
            self._on_run()
            records = run_experiment(experiment).records[experiment.warmup :]
            found = self._shares[experiment] = tuple(_is_within(each, experiment.slo_ttft_s) for each in records)
        return found


def _is_within(record: Record, slo_ttft_s: float) -> bool:
    return record.ttft_s is not None and record.ttft_s <= slo_ttft_s


def _interval(values: Sequence[int]) -> tuple[float, float]:
    """Return the interval of the mean of values in order of arrival, by resampling the parts of the run."""
    length = max(1, ceil(len(values) / _PARTS))
    parts = [values[start : start + length] for start in range(0, len(values), length)]
    draws = Random(_SEED)
    means = []
    for _ in range(_RESAMPLES):
        drawn = draws.choices(parts, k=len(parts))
        means.append(sum(map(sum, drawn)) / sum(map(len, drawn)))
    means.sort()
    low, high = (means[int(share * (_RESAMPLES - 1))] for share in _INTERVAL)
    return low, high
