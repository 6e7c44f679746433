"""A capacity plan: sizes with their attainment, and what caches, a store, autoscaling and settings would change."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil
from typing import Final

from dualmap_sim.experiment import Experiment, load_trace, run_experiment
from dualmap_sim.planning.intervals import Share, interval, mean, widened
from dualmap_sim.planning.sizes import Fleet, Unattainable, fewest_up_to, least_instances, least_split
from dualmap_sim.planning.windows import HOUR_S, NoWindow, Peak, Window, windows_of
from dualmap_sim.presets import EngineConfig
from dualmap_sim.records import Record
from dualmap_sim.shared_store import StoreConfig
from dualmap_sim.workloads.statistics import decode_work_s, ideal_cached_tokens, prefill_work_s

_DECODE_MARGIN: Final = 8
"""An assumption: only a part of the decode work delays first tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engines:
    """The engine as fitted, and the slowest and the fastest engine within the intervals of the fit."""

    usual: EngineConfig
    slowest: EngineConfig
    fastest: EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A fleet and what it attains: over the whole workload, and in the window that decides about the peak."""

    fleet: Fleet
    slo_attainment: Share
    at_peak: Share | None
    """None if the plan has no peak."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The least fleet, and the least ones with the fastest and the slowest engine.

    ``high`` is None if no number of the slowest ones suffices.
    """

    usual: Fleet
    low: Fleet
    high: Fleet | None


class Capacity:
    """Simulations of a workload at different sizes. ``base`` has the workload at its rate, the pool and the SLO.

    A fleet suffices if the share ``target`` of all requests is within the SLO, and with a ``peak`` also the share
    ``target`` of each window that may not miss it. With ``prefillers`` in ``base``, fleets have a prefill pool. Raises
    NoWindow for a peak without windows.
    """

    def __init__(
        self,
        base: Experiment,
        engines: Engines,
        target: float,
        *,
        peak: Peak | None = None,
        on_run: Callable[[], None] = lambda: None,
    ) -> None:
        self._base = replace(base, sample_s=None)
        self._engines = engines
        self._target = target
        self._peak = peak
        self._on_run = on_run
        self._shares: dict[Experiment, tuple[bool, ...]] = {}
        self.window_s = HOUR_S if peak is None else peak.window_s
        paced = load_trace(base).at_rate(base.requests_per_s)
        self.windows: tuple[Window, ...] = windows_of(
            [request.arrival_s for request in paced.requests[base.warmup :]], self.window_s
        )
        """The windows of the counted requests, ``window_s`` each: those of the peak, or hours."""
        if peak is not None and not self.windows:
            raise NoWindow

    def least(self) -> Fleet:
        """Return the least fleet with the usual engine. Raises Unattainable."""
        return self._least(self._engines.usual, first=self._lower_bound(self._engines.usual))

    def sizes(self, usual: Fleet) -> Sizes:
        """Return the least fleets with the fastest and with the slowest engine beside the least usual one."""
        low = self._fewest(replace(self._base, engine=self._engines.fastest), usual)
        try:
            first = usual.decoders if usual.prefillers else usual.instances
            slowest = self._least(self._engines.slowest, first=first)
        except Unattainable:
            return Sizes(usual=usual, low=low, high=None)
        return Sizes(usual=usual, low=low, high=max(usual, slowest, key=lambda fleet: fleet.instances))

    def size(self, fleet: Fleet) -> Size:
        """Return what a fleet attains."""
        at_peak = None if self._peak is None else self._share(fleet, self._deciding(fleet).part)
        return Size(fleet=fleet, slo_attainment=self._share(fleet, slice(None)), at_peak=at_peak)

    def in_windows(self, fleet: Fleet) -> tuple[Share, ...]:
        """Return what a fleet attains in each of ``windows``."""
        return tuple(self._share(fleet, window.part) for window in self.windows)

    def with_double_cache(self, sizes: Sizes) -> Sizes:
        """Return the least fleets, up to ``sizes``, if the caches of their instances were twice as large."""
        return self._with(
            sizes,
            lambda base: replace(base, engine=replace(base.engine, cache_tokens=2 * base.engine.cache_tokens)),
        )

    def with_store(self, sizes: Sizes, *, tokens_per_s: float) -> Sizes:
        """Return the least fleets, up to ``sizes``, if their instances shared a KV store that forgets nothing."""
        store = StoreConfig(tokens_per_s=tokens_per_s)
        return self._with(sizes, lambda base: replace(base, store=store, kv_moves=False))

    def gain(self, changed: Experiment, fleet: Fleet) -> Share | None:
        """Return how much more ``changed`` attains than the base with the same fleet and engines.

        With a peak, only the window that decides counts. The result is None if the gain may be chance: the interval of
        the difference with the usual engine contains 0.
        """
        part = slice(None) if self._peak is None else self._deciding(fleet).part
        usual = self._differences(changed, fleet, self._engines.usual, part)
        low, _ = interval(usual)
        if low <= 0:
            return None
        ends = [
            mean(self._differences(changed, fleet, engine, part))
            for engine in (self._engines.slowest, self._engines.fastest)
        ]
        return widened(usual, ends, least=-1.0, most=1.0)

    def busy_share(self, sizes: Sizes, *, windows: int) -> Share:
        """Return the instance hours of an autoscaler without delay, as a share of those of the least fleet.

        In each of ``windows`` equal windows of time, the autoscaler runs the share of instances that the work of the
        window's requests is of the busiest window's work: the time of their prefills without a cache.
        """
        high = sizes.usual if sizes.high is None else sizes.high
        usual, *ends = (
            self._busy(engine, fleet.instances, windows=windows)
            for engine, fleet in (
                (self._engines.usual, sizes.usual),
                (self._engines.slowest, high),
                (self._engines.fastest, sizes.low),
            )
        )
        return widened(usual, [mean(each) for each in ends], least=0.0, most=1.0)

    def check(self) -> None:
        """Check that an instance alone could serve enough requests within the SLO. Raises Unattainable."""
        trace, engine = load_trace(self._base), self._engines.usual
        cached_tokens = ideal_cached_tokens(trace)
        within = []
        for number in range(self._base.warmup, len(trace.requests)):
            tokens, cached = trace.requests[number].input_tokens, cached_tokens[number]
            seconds = engine.prefill_s(new_tokens=max(1, tokens - cached), cached_tokens=cached, pulled_tokens=0)
            within.append(seconds <= self._base.slo_ttft_s)
        share = self._held(tuple(within))
        if share < self._target:
            raise Unattainable(share=share, instances=None)

    def _least(self, engine: EngineConfig, *, first: int) -> Fleet:
        base = replace(self._base, engine=engine)
        if base.prefillers:
            return least_split(
                lambda prefillers, decoders: self._attained(base, Fleet(prefillers + decoders, prefillers)),
                self._target,
                first=first,
            )
        return Fleet(
            least_instances(lambda number: self._attained(base, Fleet(number)), self._target, first=first),
        )

    def _fewest(self, base: Experiment, most: Fleet) -> Fleet:
        """Return the least fleet, up to one that suffices; neither kind of its instances can be one fewer."""
        if not most.prefillers:
            return Fleet(
                fewest_up_to(lambda number: self._attained(base, Fleet(number)), self._target, most.instances),
            )
        prefillers = fewest_up_to(
            lambda number: self._attained(base, Fleet(most.decoders + number, number)), self._target, most.prefillers
        )
        decoders = fewest_up_to(
            lambda number: self._attained(base, Fleet(prefillers + number, prefillers)), self._target, most.decoders
        )
        return Fleet(prefillers + decoders, prefillers)

    def _with(self, sizes: Sizes, change: Callable[[Experiment], Experiment]) -> Sizes:
        usual, low = (
            self._fewest(change(replace(self._base, engine=engine)), fleet)
            for engine, fleet in ((self._engines.usual, sizes.usual), (self._engines.fastest, sizes.low))
        )
        high = sizes.high
        if high is not None:
            high = self._fewest(change(replace(self._base, engine=self._engines.slowest)), high)
            high = max(usual, high, key=lambda fleet: fleet.instances)
        return Sizes(usual=usual, low=min(usual, low, key=lambda fleet: fleet.instances), high=high)

    def _differences(self, changed: Experiment, fleet: Fleet, engine: EngineConfig, part: slice) -> list[int]:
        before, after = (
            self._within(_sized(replace(each, engine=engine, sample_s=None), fleet))[part]
            for each in (self._base, changed)
        )
        return [new - old for new, old in zip(after, before, strict=True)]

    def _busy(self, engine: EngineConfig, instances: int, *, windows: int) -> list[float]:
        """Return the share of the instances that an autoscaler runs in each window."""
        trace = load_trace(self._base)
        if not trace.duration_s:
            return [1.0] * windows
        start_s, width_s = trace.requests[0].arrival_s, trace.duration_s / windows
        work_s = [0.0] * windows
        for request in trace.requests:
            window = min(windows - 1, int((request.arrival_s - start_s) / width_s))
            work_s[window] += engine.prefill_s(new_tokens=request.input_tokens, cached_tokens=0, pulled_tokens=0)
        busiest_s = max(work_s)
        return [max(1, ceil(instances * each / busiest_s)) / instances for each in work_s]

    def _lower_bound(self, engine: EngineConfig) -> int:
        """Return a number of instances that hardly suffices: every possible cache hit occurs, and no time is lost.

        The search begins with this number, which therefore changes only how long the search takes.
        """
        trace = load_trace(self._base)
        prefill_s = prefill_work_s(trace, engine.prefill, ideally_cached=True)
        decode_s = decode_work_s(trace, engine) / _DECODE_MARGIN
        return max(1, int((prefill_s + decode_s) / max(trace.duration_s, 1e-9)))

    def _share(self, fleet: Fleet, part: slice) -> Share:
        usual, *ends = (
            self._within(_sized(replace(self._base, engine=engine), fleet))[part]
            for engine in (self._engines.usual, self._engines.slowest, self._engines.fastest)
        )
        return widened(usual, [mean(each) for each in ends], least=0.0, most=1.0)

    def _deciding(self, fleet: Fleet) -> Window:
        """Return the worst window of those that may not miss the goal, with the usual engine."""
        assert self._peak is not None, "without a peak, the whole workload decides"
        within = self._within(_sized(replace(self._base, engine=self._engines.usual), fleet))
        worst_first = sorted(self.windows, key=lambda window: mean(within[window.part]))
        return worst_first[self._peak.may_miss(len(worst_first))]

    def _attained(self, base: Experiment, fleet: Fleet) -> float:
        return self._held(self._within(_sized(base, fleet)))

    def _held(self, within: tuple[bool, ...]) -> float:
        """Return the share within the SLO: the least of the whole workload's and, with a peak, of the windows'."""
        if self._peak is None:
            return mean(within)
        shares = sorted(mean(within[window.part]) for window in self.windows)
        return min(mean(within), shares[self._peak.may_miss(len(shares))])

    def _within(self, experiment: Experiment) -> tuple[bool, ...]:
        """Return whether each counted request got its first token within the SLO, in order of arrival."""
        found = self._shares.get(experiment)
        if found is None:
            self._on_run()
            records = run_experiment(experiment).records[experiment.warmup :]
            found = self._shares[experiment] = tuple(_is_within(each, experiment.slo_ttft_s) for each in records)
        return found


def _sized(experiment: Experiment, fleet: Fleet) -> Experiment:
    return replace(experiment, instances=fleet.instances, prefillers=fleet.prefillers)


def _is_within(record: Record, slo_ttft_s: float) -> bool:
    return record.ttft_s is not None and record.ttft_s <= slo_ttft_s
