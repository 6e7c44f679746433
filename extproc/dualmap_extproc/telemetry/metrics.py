"""Prometheus metrics of one router, all named ``dualmap_*``; with ``load_gauges`` all that knows prometheus_client.

``Metrics`` implements the ports through which the data path tells what happens (``observer.Observer``,
``endpoints.DiscoveryObserver``, ``access_log.AccessLogObserver``); loads are not told but read from the routers'
statuses at each scrape. docs/metrics.md lists every name with what it means and what to do with it; a test holds the
two equal. ``http_status`` serves the result.

What every request counts is counted in plain numbers (``counts``), of which a scrape makes series: an increment of
prometheus_client's takes 1 us and a histogram's observation 2 us, ten to twenty times as much. Endpoints and pools that
vanish take their counts along, so that no series of a gone instance stays behind.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Info, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from dualmap.pools.pool import Pool
from dualmap.requests import Completion, Decision, FirstToken, PoolSnapshot
from dualmap.scaling.scaling import PoolSignals
from dualmap_extproc.autoscaling.demand import Demand
from dualmap_extproc.errors import Refused
from dualmap_extproc.telemetry.counts import Distribution, EndpointCounts, PoolCounts, Traffic
from dualmap_extproc.telemetry.load_gauges import load_gauges

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST

# Around the objectives that pools set: 100 ms to 10 min by the schema, seconds in practice (5 s in the paper).
_TTFT_BUCKETS_S: Final = (0.05, 0.1, 0.2, 0.5, 1, 2, 3, 4, 5, 7.5, 10, 15, 20, 30, 60, 120)
# Up to the longest wait that pools may set, 10 min.
_HELD_BUCKETS_S: Final = (0.01, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600)
# A decision takes a few hundred microseconds; a long prompt, milliseconds.
_DECISION_BUCKETS_S: Final = (1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1)

_POOL: Final = ("pool",)
_ENDPOINT: Final = ("pool", "endpoint")
_MET, _MISSED = "met", "missed"
_OUTCOMES: Final = ("finished", "rejected", "aborted", "failed", "expired")


# Name, what it says, and where it stands in the counts.
_ENDPOINT_COUNTERS: Final[tuple[tuple[str, str, Callable[[EndpointCounts], int]], ...]] = (
    ("dualmap_requests", "Requests sent to the endpoint.", lambda counts: counts.requests),
    ("dualmap_prompt_tokens", "Prompt tokens routed (estimated).", lambda counts: counts.prompt_tokens),
    (
        "dualmap_predicted_cached_tokens",
        "Prompt tokens predicted cached.",
        lambda counts: counts.predicted_cached_tokens,
    ),
    (
        "dualmap_checked_cached_tokens",
        "Tokens predicted cached, of requests measured since.",
        lambda counts: counts.checked_cached_tokens,
    ),
    (
        "dualmap_measured_cached_tokens",
        "Prompt tokens the engine had cached.",
        lambda counts: counts.measured_cached_tokens,
    ),
)
# The same by one more label.
_ENDPOINT_KINDS: Final[tuple[tuple[str, str, str, Callable[[EndpointCounts], dict[str, int]]], ...]] = (
    ("dualmap_completions", "Requests that ended, by outcome.", "outcome", lambda counts: counts.outcomes),
    ("dualmap_first_tokens", "First tokens, in time or not.", "slo", lambda counts: counts.first_tokens),
)
_POOL_COUNTERS: Final[tuple[tuple[str, str, Callable[[PoolCounts], int]], ...]] = (
    ("dualmap_bodiless_requests", "Requests without a prompt, sent anywhere.", lambda counts: counts.bodiless),
    (
        "dualmap_served_elsewhere",
        "Requests another endpoint served than chosen.",
        lambda counts: counts.served_elsewhere,
    ),
)
_POOL_DISTRIBUTIONS: Final[tuple[tuple[str, str, Sequence[float], Callable[[PoolCounts], Distribution]], ...]] = (
    ("dualmap_ttft_seconds", "Arrival to first token.", _TTFT_BUCKETS_S, lambda counts: counts.ttft_s),
    (
        "dualmap_predicted_ttft_seconds",
        "Arrival to first token as predicted at the decision.",
        _TTFT_BUCKETS_S,
        lambda counts: counts.predicted_ttft_s,
    ),
    ("dualmap_held_seconds", "How long held requests waited.", _HELD_BUCKETS_S, lambda counts: counts.held_s),
)


class Metrics:
    """Every metric of one router, in a registry of its own. Its methods belong to the event loop, ``render`` excepted.

    ``set_pools`` must be told of pools and members before anything happens to them; what happens to those it does not
    know (a request that outlives its endpoint) counts for the pool, if that is left, and for no endpoint.
    """

    def __init__(self, *, version: str, replica_id: str, demand: Demand | None = None) -> None:
        self._registry = registry = CollectorRegistry()
        self._pools: dict[str, PoolCounts] = {}
        self._demand = demand or Demand()
        self._decision_s = Distribution(_DECISION_BUCKETS_S)
        # Refusals of requests that reached no pool.
        self._poolless: dict[str, int] = {}
        registry.register(_Counted(self._pools, self._poolless, self._decision_s))
        Info("dualmap_build", "Version and name of this router.", registry=registry).info(
            {"version": version, "replica": replica_id}
        )

        def counter(name: str, text: str, labels: Sequence[str] = ()) -> Counter:
            return Counter(name, text, labels, registry=registry)

        self._streams = Gauge("dualmap_discovery_streams", "Discovery streams Envoys hold open.", registry=registry)
        self._pushes = counter("dualmap_discovery_pushes", "Sets of endpoints, clusters or routes sent to Envoys.")
        self._rejections = counter(
            "dualmap_discovery_rejections", "Sets of endpoints, clusters or routes an Envoy refused."
        )
        entries = counter("dualmap_access_log_entries", "Access log entries received.", ("picked",))
        self._entries_picked, self._entries_other = entries.labels("yes"), entries.labels("no")
        self._unreadable = counter("dualmap_access_log_unreadable_batches", "Access log batches lost as unreadable.")
        self._slo_ttft_s = Gauge(
            "dualmap_pool_slo_ttft_seconds", "The objective for the time to first token.", _POOL, registry=registry
        )
        self._slo_goal = Gauge(
            "dualmap_pool_slo_goal", "Share of the requests that shall meet it.", _POOL, registry=registry
        )
        self._pool_refusals = counter("dualmap_pool_refusals", "Changes of pools refused.")
        self._pool_file_refused = Gauge(
            "dualmap_pool_file_refused", "1 while a pool file is refused or missing.", registry=registry
        )

    @property
    def registry(self) -> CollectorRegistry:
        """Where metrics of other modules are registered, to be rendered with these."""
        return self._registry

    def set_pools(self, pools: Iterable[Pool]) -> None:
        """Have series for exactly these pools and their members; counts of those that stay go on."""
        pools = tuple(pools)
        self._demand.set_pools(pools)
        members = {pool.id: {member.id for member in pool.members} for pool in pools}
        for pool in self._pools.keys() - members.keys():
            del self._pools[pool]
            self._slo_ttft_s.remove(pool)
            self._slo_goal.remove(pool)
        for each in pools:
            self._slo_ttft_s.labels(each.id).set(each.slo.ttft_s)
            self._slo_goal.labels(each.id).set(each.slo.attainment)
        for pool, present in members.items():
            if pool not in self._pools:
                self._pools[pool] = PoolCounts(
                    ttft_s=Distribution(_TTFT_BUCKETS_S),
                    predicted_ttft_s=Distribution(_TTFT_BUCKETS_S),
                    held_s=Distribution(_HELD_BUCKETS_S),
                )
            endpoints = self._pools[pool].endpoints
            for endpoint in endpoints.keys() - present:
                del endpoints[endpoint]
            for endpoint in sorted(present - endpoints.keys()):
                endpoints[endpoint] = EndpointCounts(
                    outcomes=dict.fromkeys(_OUTCOMES, 0), first_tokens=dict.fromkeys((_MET, _MISSED), 0)
                )

    def traffic(self, pool: str) -> Traffic:
        """Return a pool's totals (``pool`` is ``namespace/name``); zeros for one that is not known."""
        counters = self._pools.get(pool)
        return Traffic() if counters is None else counters.traffic

    def signals(self, statuses: Sequence[PoolSnapshot]) -> Mapping[str, PoolSignals]:
        """Return what autoscalers shall know of each pool (``namespace/name``), by statuses of this moment."""
        return self._demand.signals(statuses)

    def render(self, statuses: Sequence[PoolSnapshot], signals: Mapping[str, PoolSignals]) -> bytes:
        """Return everything in Prometheus' text format, with these loads and ``signals``; safe in any thread."""
        return generate_latest(_Scrape(self._registry, statuses, signals))

    def routed(self, pool: str, decision: Decision) -> None:
        """Count a request sent to an instance (Observer)."""
        self._demand.routed(pool, decision)
        counters = self._pools.get(pool)
        if counters is None:
            return
        receipt = decision.receipt
        traffic = counters.traffic
        traffic.requests += 1
        traffic.prompt_tokens += receipt.prompt_tokens
        traffic.predicted_cached_tokens += receipt.matched_tokens
        counters.rules[receipt.rule] = counters.rules.get(receipt.rule, 0) + 1
        endpoint = counters.endpoints.get(receipt.chosen)
        if endpoint is not None:
            endpoint.requests += 1
            endpoint.prompt_tokens += receipt.prompt_tokens
            endpoint.predicted_cached_tokens += receipt.matched_tokens

    def routed_bodiless(self, pool: str) -> None:
        """Count a request without a prompt (Observer)."""
        if pool in self._pools:
            self._pools[pool].bodiless += 1

    def refused(self, refused: Refused) -> None:
        """Count a request that got an error (Observer); one that reached no pool has an empty ``pool`` label."""
        self._demand.refused(refused)
        counters = self._pools.get(refused.pool)
        if counters is not None:
            counters.traffic.refused += 1
        refusals = self._poolless if counters is None else counters.refusals
        refusals[refused.code] = refusals.get(refused.code, 0) + 1

    def waited(self, pool: str, seconds: float) -> None:
        """Count how long a request was held (Observer)."""
        counters = self._pools.get(pool)
        if counters is not None:
            counters.held_s.observe(seconds)

    def decided(self, seconds: float) -> None:
        """Count the time a decision took (Observer)."""
        self._decision_s.observe(seconds)

    def first_token(self, pool: str, first_token: FirstToken) -> None:
        """Count a first token and whether it came in time (Observer)."""
        self._demand.first_token(pool, first_token)
        counters = self._pools.get(pool)
        if counters is None:
            return
        counters.ttft_s.observe(first_token.ttft_s)
        counters.predicted_ttft_s.observe(first_token.predicted_ttft_s)
        counters.traffic.first_tokens += 1
        counters.traffic.slo_met += first_token.within_slo
        endpoint = counters.endpoints.get(first_token.member)
        if endpoint is not None:
            endpoint.first_tokens[_MET if first_token.within_slo else _MISSED] += 1

    def finished(self, pool: str, completion: Completion) -> None:
        """Count a request that ended well (Observer)."""
        self._count_outcome(pool, completion, "finished")

    def rejected(self, pool: str, completion: Completion) -> None:
        """Count a request that the engine did not take (Observer)."""
        self._count_outcome(pool, completion, "rejected")

    def aborted(self, pool: str, completion: Completion) -> None:
        """Count a request that was cancelled or broke off (Observer)."""
        self._count_outcome(pool, completion, "aborted")

    def failed(self, pool: str, completion: Completion) -> None:
        """Count a request that its instance failed to serve (Observer)."""
        self._count_outcome(pool, completion, "failed")

    def expired(self, pool: str, completion: Completion) -> None:
        """Count a request of which nothing was heard any more (Observer)."""
        self._count_outcome(pool, completion, "expired")

    def measured(self, pool: str, completion: Completion) -> None:
        """Count the cached tokens an engine reported, beside those predicted for the same request (Observer)."""
        counters = self._pools.get(pool)
        if counters is None or completion.measured_cached_tokens is None:
            return
        counters.traffic.measured_cached_tokens += completion.measured_cached_tokens
        endpoint = counters.endpoints.get(completion.member)
        if endpoint is not None:
            endpoint.checked_cached_tokens += completion.predicted_cached_tokens
            endpoint.measured_cached_tokens += completion.measured_cached_tokens

    def served_elsewhere(self, pool: str) -> None:
        """Count a request that another instance served than the chosen one (Observer)."""
        if pool in self._pools:
            self._pools[pool].served_elsewhere += 1

    def discovery_streams(self, count: int) -> None:
        """Note how many discovery streams are open (DiscoveryObserver)."""
        self._streams.set(count)

    def discovery_pushed(self) -> None:
        """Count a set of endpoints sent (DiscoveryObserver)."""
        self._pushes.inc()

    def discovery_rejected(self) -> None:
        """Count a set of endpoints that an Envoy refused (DiscoveryObserver)."""
        self._rejections.inc()

    def access_log_entries(self, *, known: int, others: int) -> None:
        """Count access log entries, with a router's request id and without (AccessLogObserver)."""
        self._entries_picked.inc(known)
        self._entries_other.inc(others)

    def access_log_unreadable(self) -> None:
        """Count a batch of entries lost (AccessLogObserver)."""
        self._unreadable.inc()

    def pools_refused(self) -> None:
        """Count a change of pools that was refused while the last good ones serve on."""
        self._pool_refusals.inc()

    def pool_file_refused(self, refused: bool) -> None:
        """Note whether any pool file is refused or missing now."""
        self._pool_file_refused.set(refused)

    def _count_outcome(self, pool: str, completion: Completion, outcome: str) -> None:
        counters = self._pools.get(pool)
        endpoint = None if counters is None else counters.endpoints.get(completion.member)
        if endpoint is not None:
            endpoint.outcomes[outcome] += 1


class _Counted(Collector):
    """The series of what was counted, made at the moment of a scrape, by its thread."""

    def __init__(self, pools: Mapping[str, PoolCounts], poolless: Mapping[str, int], decision_s: Distribution) -> None:
        self._pools = pools
        self._poolless = poolless
        self._decision_s = decision_s

    def collect(self) -> Iterator[Metric]:
        """Yield every family (prometheus_client's Collector)."""
        # Lists, here and below: the event loop may add a pool, an endpoint or a rule meanwhile.
        pools = list(self._pools.items())
        yield from _endpoint_families(pools)
        for name, text, pool_count in _POOL_COUNTERS:
            family = CounterMetricFamily(name, text, labels=_POOL)
            for pool, counts in pools:
                family.add_metric((pool,), pool_count(counts))
            yield family
        rules = [(pool, counts.rules) for pool, counts in pools]
        yield _by_kind("dualmap_decisions", "Decisions, by the rule that fired.", "rule", rules)
        refusals = [("", self._poolless), *((pool, counts.refusals) for pool, counts in pools)]
        yield _by_kind("dualmap_refused_requests", "Requests answered with an error.", "code", refusals)
        for name, text, bounds, distribution in _POOL_DISTRIBUTIONS:
            histogram = HistogramMetricFamily(name, text, labels=_POOL)
            for pool, counts in pools:
                _add(histogram, (pool,), bounds, distribution(counts))
            yield histogram
        decisions = HistogramMetricFamily("dualmap_decision_seconds", "From whole body to answer.", labels=())
        _add(decisions, (), _DECISION_BUCKETS_S, self._decision_s)
        yield decisions


def _endpoint_families(pools: Sequence[tuple[str, PoolCounts]]) -> Iterator[Metric]:
    endpoints = [((pool, each), counted) for pool, counts in pools for each, counted in list(counts.endpoints.items())]
    for name, text, count in _ENDPOINT_COUNTERS:
        family = CounterMetricFamily(name, text, labels=_ENDPOINT)
        for labels, counted in endpoints:
            family.add_metric(labels, count(counted))
        yield family
    for name, text, label, kinds in _ENDPOINT_KINDS:
        family = CounterMetricFamily(name, text, labels=(*_ENDPOINT, label))
        for labels, counted in endpoints:
            for kind, number in kinds(counted).items():
                family.add_metric((*labels, kind), number)
        yield family


def _by_kind(name: str, text: str, label: str, pools: Sequence[tuple[str, Mapping[str, int]]]) -> Metric:
    family = CounterMetricFamily(name, text, labels=(*_POOL, label))
    for pool, kinds in pools:
        for kind, number in list(kinds.items()):
            family.add_metric((pool, kind), number)
    return family


def _add(family: HistogramMetricFamily, labels: Sequence[str], bounds: Sequence[float], of: Distribution) -> None:
    names = [*(str(float(bound)) for bound in bounds), "+Inf"]
    family.add_metric(labels, list(zip(names, of.cumulative(), strict=True)), sum_value=of.total)


class _Scrape(Collector):
    """One scrape: what was counted, and the loads as the statuses and signals have them."""

    def __init__(
        self, registry: CollectorRegistry, statuses: Sequence[PoolSnapshot], signals: Mapping[str, PoolSignals]
    ) -> None:
        self._registry = registry
        self._statuses = statuses
        self._signals = signals

    def collect(self) -> Iterator[Metric]:
        """Yield every metric family (prometheus_client's Collector)."""
        for family in self._registry.collect():
            # prometheus_client adds the time of creation to each series; nobody reads it, and it doubles the page.
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family
        yield from load_gauges(self._statuses, self._signals)
