"""Prometheus metrics of one router, all named ``dualmap_*``; with ``load_gauges`` all that knows prometheus_client.

``Metrics`` implements the ports through which the data path tells what happens (``observer.Observer``,
``endpoints.DiscoveryObserver``, ``access_log.AccessLogObserver``); loads are not told but read from the routers'
statuses at each scrape. docs/metrics.md lists every name with what it means and what to do with it; a test holds the
two equal. ``http_status`` serves the result.

A request costs a few counter increments (about 1 us each): each pool and endpoint has its label children looked up
once, when it appears, and dropped when it vanishes, so that no series of a gone instance stays behind.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, Info, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from dualmap.pool import Pool
from dualmap.requests import Completion, Decision, FirstToken, PoolStatus
from dualmap_extproc.errors import Refused
from dualmap_extproc.load_gauges import load_gauges

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST

# Around the objectives that pools set: 100 ms to 10 min by the schema, seconds in practice (5 s in the paper).
_TTFT_BUCKETS_S: Final = (0.05, 0.1, 0.2, 0.5, 1, 2, 3, 4, 5, 7.5, 10, 15, 20, 30, 60, 120)
# Up to the longest wait that pools may set, 10 min.
_HELD_BUCKETS_S: Final = (0.01, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600)
# A decision takes a few hundred microseconds; a long prompt, milliseconds.
_DECISION_BUCKETS_S: Final = (1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1)

_POOL: Final = ("pool",)
_ENDPOINT: Final = ("pool", "endpoint")
_OUTCOMES: Final = ("finished", "rejected", "aborted", "failed", "expired")


@dataclass(slots=True, kw_only=True)
class Traffic:
    """What became of one pool's requests since this router began to serve it; every number only grows.

    ``first_tokens`` counts responses whose first token was seen (event streams), ``slo_met`` those of them in time.
    ``prompt_tokens`` and ``predicted_cached_tokens`` are the router's estimates for all requests it routed,
    ``measured_cached_tokens`` is what engines reported.
    """

    requests: int = 0
    refused: int = 0
    first_tokens: int = 0
    slo_met: int = 0
    prompt_tokens: int = 0
    predicted_cached_tokens: int = 0
    measured_cached_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _EndpointCounters:
    """The label children of one endpoint."""

    requests: Counter
    outcomes: dict[str, Counter]
    slo_met: Counter
    slo_missed: Counter
    prompt_tokens: Counter
    predicted_cached_tokens: Counter
    checked_cached_tokens: Counter
    measured_cached_tokens: Counter


@dataclass(frozen=True, slots=True, kw_only=True)
class _PoolCounters:
    """The label children of one pool, and of its endpoints by member id."""

    ttft_s: Histogram
    predicted_ttft_s: Histogram
    held_s: Histogram
    bodiless: Counter
    served_elsewhere: Counter
    traffic: Traffic = field(default_factory=Traffic)
    endpoints: dict[str, _EndpointCounters] = field(default_factory=dict)
    rules: dict[str, Counter] = field(default_factory=dict)
    refusals: dict[str, Counter] = field(default_factory=dict)


class Metrics:
    """Every metric of one router, in a registry of its own. Its methods belong to the event loop, ``render`` excepted.

    ``set_pools`` must be told of pools and members before anything happens to them; what happens to those it does not
    know (a request that outlives its endpoint) counts for the pool, if that is left, and for no endpoint.
    """

    def __init__(self, *, version: str, replica_id: str) -> None:
        self._registry = registry = CollectorRegistry()
        self._pools: dict[str, _PoolCounters] = {}
        Info("dualmap_build", "Version and name of this router.", registry=registry).info(
            {"version": version, "replica": replica_id}
        )

        def counter(name: str, text: str, labels: Sequence[str] = ()) -> Counter:
            return Counter(name, text, labels, registry=registry)

        self._requests = counter("dualmap_requests", "Requests sent to the endpoint.", _ENDPOINT)
        self._outcomes = counter("dualmap_completions", "Requests that ended, by outcome.", (*_ENDPOINT, "outcome"))
        self._slo = counter("dualmap_first_tokens", "First tokens, in time or not.", (*_ENDPOINT, "slo"))
        self._prompt = counter("dualmap_prompt_tokens", "Prompt tokens routed (estimated).", _ENDPOINT)
        self._predicted = counter("dualmap_predicted_cached_tokens", "Prompt tokens predicted cached.", _ENDPOINT)
        self._checked = counter(
            "dualmap_checked_cached_tokens", "Tokens predicted cached, of requests measured since.", _ENDPOINT
        )
        self._measured = counter("dualmap_measured_cached_tokens", "Prompt tokens the engine had cached.", _ENDPOINT)
        self._decisions = counter("dualmap_decisions", "Decisions, by the rule that fired.", (*_POOL, "rule"))
        self._bodiless = counter("dualmap_bodiless_requests", "Requests without a prompt, sent anywhere.", _POOL)
        self._elsewhere = counter("dualmap_served_elsewhere", "Requests another endpoint served than chosen.", _POOL)
        self._refusals = counter("dualmap_refused_requests", "Requests answered with an error.", (*_POOL, "code"))
        self._ttft = Histogram(
            "dualmap_ttft_seconds", "Arrival to first token.", _POOL, buckets=_TTFT_BUCKETS_S, registry=registry
        )
        self._predicted_ttft = Histogram(
            "dualmap_predicted_ttft_seconds",
            "Arrival to first token as predicted at the decision.",
            _POOL,
            buckets=_TTFT_BUCKETS_S,
            registry=registry,
        )
        self._held = Histogram(
            "dualmap_held_seconds",
            "How long held requests waited.",
            _POOL,
            buckets=_HELD_BUCKETS_S,
            registry=registry,
        )
        self._decision = Histogram(
            "dualmap_decision_seconds", "From whole body to answer.", buckets=_DECISION_BUCKETS_S, registry=registry
        )
        self._streams = Gauge("dualmap_discovery_streams", "Discovery streams Envoys hold open.", registry=registry)
        self._pushes = counter("dualmap_discovery_pushes", "Sets of endpoints sent to Envoys.")
        self._rejections = counter("dualmap_discovery_rejections", "Sets of endpoints an Envoy refused.")
        entries = counter("dualmap_access_log_entries", "Access log entries received.", ("picked",))
        self._entries_picked, self._entries_other = entries.labels("yes"), entries.labels("no")
        self._unreadable = counter("dualmap_access_log_unreadable_batches", "Access log batches lost as unreadable.")
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
        members = {pool.id: {member.id for member in pool.members} for pool in pools}
        for pool in self._pools.keys() - members.keys():
            self._drop_pool(pool)
        for pool, present in members.items():
            if pool not in self._pools:
                self._pools[pool] = _PoolCounters(
                    ttft_s=self._ttft.labels(pool),
                    predicted_ttft_s=self._predicted_ttft.labels(pool),
                    held_s=self._held.labels(pool),
                    bodiless=self._bodiless.labels(pool),
                    served_elsewhere=self._elsewhere.labels(pool),
                )
            endpoints = self._pools[pool].endpoints
            for endpoint in endpoints.keys() - present:
                self._drop_endpoint(pool, endpoint)
            for endpoint in sorted(present - endpoints.keys()):
                endpoints[endpoint] = self._endpoint_counters(pool, endpoint)

    def traffic(self, pool: str) -> Traffic:
        """Return a pool's totals (``pool`` is ``namespace/name``); zeros for one that is not known."""
        counters = self._pools.get(pool)
        return Traffic() if counters is None else counters.traffic

    def render(self, statuses: Sequence[PoolStatus]) -> bytes:
        """Return everything in Prometheus' text format, with the loads of ``statuses``; safe in any thread."""
        return generate_latest(_Scrape(self._registry, statuses))

    def routed(self, pool: str, decision: Decision) -> None:
        """Count a request sent to an instance (Observer)."""
        counters = self._pools.get(pool)
        if counters is None:
            return
        receipt = decision.receipt
        traffic = counters.traffic
        traffic.requests += 1
        traffic.prompt_tokens += receipt.prompt_tokens
        traffic.predicted_cached_tokens += receipt.matched_tokens
        rule = counters.rules.get(receipt.rule)
        if rule is None:
            rule = counters.rules[receipt.rule] = self._decisions.labels(pool, receipt.rule)
        rule.inc()
        endpoint = counters.endpoints.get(receipt.chosen)
        if endpoint is not None:
            endpoint.requests.inc()
            endpoint.prompt_tokens.inc(receipt.prompt_tokens)
            endpoint.predicted_cached_tokens.inc(receipt.matched_tokens)

    def routed_bodiless(self, pool: str) -> None:
        """Count a request without a prompt (Observer)."""
        if pool in self._pools:
            self._pools[pool].bodiless.inc()

    def refused(self, refused: Refused) -> None:
        """Count a request that got an error (Observer); one that reached no pool has an empty ``pool`` label."""
        counters = self._pools.get(refused.pool)
        if counters is None:
            self._refusals.labels("", refused.code).inc()
            return
        counters.traffic.refused += 1
        if refused.code not in counters.refusals:
            counters.refusals[refused.code] = self._refusals.labels(refused.pool, refused.code)
        counters.refusals[refused.code].inc()

    def waited(self, pool: str, seconds: float) -> None:
        """Count how long a request was held (Observer)."""
        counters = self._pools.get(pool)
        if counters is not None:
            counters.held_s.observe(seconds)

    def decided(self, seconds: float) -> None:
        """Count the time a decision took (Observer)."""
        self._decision.observe(seconds)

    def first_token(self, pool: str, first_token: FirstToken) -> None:
        """Count a first token and whether it came in time (Observer)."""
        counters = self._pools.get(pool)
        if counters is None:
            return
        counters.ttft_s.observe(first_token.ttft_s)
        counters.predicted_ttft_s.observe(first_token.predicted_ttft_s)
        counters.traffic.first_tokens += 1
        counters.traffic.slo_met += first_token.within_slo
        endpoint = counters.endpoints.get(first_token.member)
        if endpoint is not None:
            (endpoint.slo_met if first_token.within_slo else endpoint.slo_missed).inc()

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
            endpoint.checked_cached_tokens.inc(completion.predicted_cached_tokens)
            endpoint.measured_cached_tokens.inc(completion.measured_cached_tokens)

    def served_elsewhere(self, pool: str) -> None:
        """Count a request that another instance served than the chosen one (Observer)."""
        if pool in self._pools:
            self._pools[pool].served_elsewhere.inc()

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
            endpoint.outcomes[outcome].inc()

    def _endpoint_counters(self, pool: str, endpoint: str) -> _EndpointCounters:
        return _EndpointCounters(
            requests=self._requests.labels(pool, endpoint),
            outcomes={outcome: self._outcomes.labels(pool, endpoint, outcome) for outcome in _OUTCOMES},
            slo_met=self._slo.labels(pool, endpoint, "met"),
            slo_missed=self._slo.labels(pool, endpoint, "missed"),
            prompt_tokens=self._prompt.labels(pool, endpoint),
            predicted_cached_tokens=self._predicted.labels(pool, endpoint),
            checked_cached_tokens=self._checked.labels(pool, endpoint),
            measured_cached_tokens=self._measured.labels(pool, endpoint),
        )

    def _drop_endpoint(self, pool: str, endpoint: str) -> None:
        del self._pools[pool].endpoints[endpoint]
        for metric in (self._requests, self._prompt, self._predicted, self._checked, self._measured):
            metric.remove(pool, endpoint)
        for outcome in _OUTCOMES:
            self._outcomes.remove(pool, endpoint, outcome)
        for slo in ("met", "missed"):
            self._slo.remove(pool, endpoint, slo)

    def _drop_pool(self, pool: str) -> None:
        counters = self._pools[pool]
        for endpoint in tuple(counters.endpoints):
            self._drop_endpoint(pool, endpoint)
        for rule in counters.rules:
            self._decisions.remove(pool, rule)
        for code in counters.refusals:
            self._refusals.remove(pool, code)
        for metric in (self._ttft, self._predicted_ttft, self._held, self._bodiless, self._elsewhere):
            metric.remove(pool)
        del self._pools[pool]


class _Scrape(Collector):
    """One scrape: what was counted, and the loads as the statuses have them."""

    def __init__(self, registry: CollectorRegistry, statuses: Sequence[PoolStatus]) -> None:
        self._registry = registry
        self._statuses = statuses

    def collect(self) -> Iterator[Metric]:
        """Yield every metric family (prometheus_client's Collector)."""
        for family in self._registry.collect():
            # prometheus_client adds the time of creation to each series; nobody reads it, and it doubles the page.
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family
        yield from load_gauges(self._statuses)
