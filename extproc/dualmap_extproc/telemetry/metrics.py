"""The metrics page of one router; every metric's name begins with ``dualmap_``.

The module ``counts`` counts requests. This module has counters of discovery, the access log and pool changes. The
module also makes gauges of each pool's load at a scrape, from the pools' statuses and signals. The page docs/metrics.md
lists every name with its meaning and use, and a test compares this list with the metrics. ``http_status`` serves the
page.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Info, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from dualmap.engines.source import SourceState
from dualmap.pools.pool import MemberState, Pool
from dualmap.requests import EndpointStatus, PoolSnapshot
from dualmap.scaling.scaling import PoolSignals
from dualmap_extproc.names import replica_of
from dualmap_extproc.request.observations import FanOut
from dualmap_extproc.telemetry.counts import RequestCounts, Traffic

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST

_POOL: Final = ("pool",)
_ENDPOINT: Final = ("pool", "endpoint")
_POLICY: Final = ("pool", "policy")

_EndpointGauge = tuple[str, str, Callable[[EndpointStatus], float | None]]
_PoolGauge = tuple[str, str, Callable[[PoolSnapshot], float]]
_Signal = tuple[str, str, Callable[[PoolSignals], float | None]]

# Name after ``dualmap_endpoint_``, help text, and a function that reads the value from a status.
_ENDPOINT_GAUGES: Final[tuple[_EndpointGauge, ...]] = (
    (
        "pending_prefill_tokens",
        "Uncached prompt tokens sent to the endpoint and not yet prefilled.",
        lambda endpoint: endpoint.pending_prefill_tokens,
    ),
    ("in_flight_requests", "Requests sent to the endpoint and not yet ended.", lambda endpoint: endpoint.in_flight),
    ("held_requests", "Requests queued in this router for the endpoint.", lambda endpoint: endpoint.held),
    (
        "held_prefill_tokens",
        "Uncached prompt tokens of the requests queued for the endpoint.",
        lambda endpoint: endpoint.held_prefill_tokens,
    ),
    (
        "active_kv_tokens",
        "Prompt tokens of the requests in flight at the endpoint.",
        lambda endpoint: endpoint.active_kv_tokens,
    ),
    (
        "prefill_tokens_per_second",
        "Prefill speed of the endpoint, measured from first tokens, in tokens per second.",
        # The value is a quotient of averages, so more digits have no meaning.
        lambda endpoint: round(endpoint.prefill_tokens_per_second, 1),
    ),
    (
        "solo_prefill_tokens_per_second",
        "Prefill speed of the endpoint while only this router uses it, in tokens per second.",
        lambda endpoint: round(endpoint.solo_tokens_per_second, 1),
    ),
    (
        "indexed_blocks",
        "Prompt blocks that this router expects in the endpoint's cache.",
        lambda endpoint: endpoint.indexed_blocks,
    ),
    (
        "weight",
        "Weight of the endpoint on the hash rings; below 100 while the endpoint joins.",
        lambda endpoint: endpoint.weight,
    ),
    ("suspended", "1 if the endpoint is suspended after failures, else 0.", lambda endpoint: endpoint.suspended),
    (
        "leave_timestamp_seconds",
        "Time at which the endpoint must stop, in seconds since the epoch; absent without notice.",
        lambda endpoint: endpoint.leave_at_s,
    ),
)
# The gauges of pools, with the name after ``dualmap_``.
_POOL_GAUGES: Final[tuple[_PoolGauge, ...]] = (
    ("pool_held_requests", "Requests queued in this router.", lambda status: status.held),
    ("pool_sessions", "Sessions for which this router stores an endpoint.", lambda status: status.sessions),
    ("pool_peers", "Other routers that recently sent a replication update.", lambda status: status.peers),
    ("ring_version", "Ring version that this router applies.", lambda status: status.ring_version),
    (
        "hotness_nodes",
        "Prefixes for which this router tracks the share of traffic.",
        lambda status: status.hotness_nodes,
    ),
    ("split_prefixes", "Hot prefixes that use a longer key.", lambda status: status.split_prefixes),
)
# The signals for autoscalers, with the name after ``dualmap_pool_``. Values are rounded, because more digits of rates
# and shares have no meaning.
_SIGNALS: Final[tuple[_Signal, ...]] = (
    (
        "pending_prefill_tokens_per_endpoint",
        "Uncached prompt tokens of requests that have no first token yet, as a mean per endpoint.",
        lambda signals: round(signals.pending_prefill_tokens_per_endpoint, 1),
    ),
    (
        "arriving_uncached_tokens_per_second",
        "Uncached prompt tokens of arriving requests, in tokens per second.",
        lambda signals: round(signals.arriving_uncached_tokens_per_second, 1),
    ),
    (
        "slo_attainment",
        "Share of the last minute's first tokens that met the SLO, from 0 to 1.",
        lambda signals: None if signals.slo_attainment is None else round(signals.slo_attainment, 4),
    ),
    (
        "desired_replicas",
        "Desired replicas for the traffic of this router; the pool needs the rounded-up sum over all routers.",
        lambda signals: round(signals.desired_replicas, 3),
    ),
)


class Metrics:
    """Every metric of one router, in its own registry. Only ``render`` may run outside the event loop's thread.

    The class implements ``envoy.discovery.service.DiscoveryObserver`` and ``envoy.access_log.sink.AccessLogObserver``.
    """

    def __init__(self, *, version: str, replica_id: str) -> None:
        self._replica_id = replica_id
        self._registry = registry = CollectorRegistry()
        self._counts = RequestCounts()
        registry.register(self._counts)
        Info("dualmap_build", "Version and name of this router.", registry=registry).info(
            {"version": version, "replica": replica_id}
        )

        def counter(name: str, text: str, labels: Sequence[str] = ()) -> Counter:
            return Counter(name, text, labels, registry=registry)

        self._streams = Gauge("dualmap_discovery_streams", "Open xDS streams to Envoy instances.", registry=registry)
        self._pushes = counter("dualmap_discovery_pushes", "xDS responses sent to Envoy instances.")
        self._rejections = counter("dualmap_discovery_rejections", "xDS responses that an Envoy instance rejected.")
        entries = counter(
            "dualmap_access_log_entries",
            "Access log entries received, by whether a router picked the endpoint.",
            ("picked",),
        )
        self._entries_picked, self._entries_other = entries.labels("yes"), entries.labels("no")
        self._unreadable = counter(
            "dualmap_access_log_unreadable_batches", "Access log batches dropped because the router cannot decode them."
        )
        self._foreign = counter(
            "dualmap_access_log_foreign_entries",
            "Access log entries ignored because of a forged request id, or because another Envoy sent the request.",
        )
        self._undelivered = counter(
            "dualmap_access_log_undelivered_entries",
            "Access log entries about requests of routers to which no connection exists.",
        )
        self._slo_ttft_s = Gauge(
            "dualmap_pool_slo_ttft_seconds", "SLO for the time to first token, in seconds.", _POOL, registry=registry
        )
        self._slo_goal = Gauge(
            "dualmap_pool_slo_goal",
            "Target share of requests within the SLO, from 0 to 1.",
            _POOL,
            registry=registry,
        )
        self._pool_refusals = counter("dualmap_pool_refusals", "Pool changes that this router rejected as invalid.")
        self._buffered = Gauge(
            "dualmap_buffered_bytes", "Bytes of all request bodies that this router stores.", registry=registry
        )
        self._peers = Gauge("dualmap_peers", "Other routers to which this router is connected.", registry=registry)
        self._pool_file_refused = Gauge(
            "dualmap_pool_file_refused", "1 if any pool file is invalid or missing, else 0.", registry=registry
        )

    @property
    def registry(self) -> CollectorRegistry:
        """The registry, to which other modules add metrics."""
        return self._registry

    def show_buffered(self, buffered_bytes: Callable[[], float]) -> None:
        """Have a scrape read the bytes of all stored request bodies."""
        self._buffered.set_function(buffered_bytes)

    def show_peers(self, peers: Callable[[], float]) -> None:
        """Have a scrape read the number of connected routers."""
        self._peers.set_function(peers)

    def subscribe(self, observations: FanOut) -> None:
        """Subscribe to the observations that are counted."""
        self._counts.subscribe(observations)

    def set_pools(self, pools: Sequence[Pool]) -> None:
        """Keep the series of these pools and their members, and discard the series of all others.

        Call this method with a pool or member before the first observation of it (``RequestCounts``).
        """
        for pool in self._counts.pools - {pool.id for pool in pools}:
            self._slo_ttft_s.remove(pool)
            self._slo_goal.remove(pool)
        for each in pools:
            self._slo_ttft_s.labels(each.id).set(each.slo.ttft_s)
            self._slo_goal.labels(each.id).set(each.slo.attainment)
        self._counts.set_pools(pools)

    def traffic(self, pool: str) -> Traffic:
        """Return a pool's totals (``pool`` is ``namespace/name``); zeros for an unknown pool."""
        return self._counts.traffic(pool)

    def render(self, statuses: Sequence[PoolSnapshot], signals: Mapping[str, PoolSignals]) -> bytes:
        """Return the page in Prometheus' text format, with these statuses and signals. Any thread may call it."""
        return generate_latest(_Scrape(self._registry, statuses, signals, self._replica_id))

    def discovery_streams(self, count: int) -> None:
        """Set the count of open discovery streams (DiscoveryObserver)."""
        self._streams.set(count)

    def discovery_pushed(self) -> None:
        """Count a discovery response sent (DiscoveryObserver)."""
        self._pushes.inc()

    def discovery_rejected(self) -> None:
        """Count a discovery response that an Envoy rejected (DiscoveryObserver)."""
        self._rejections.inc()

    def access_log_entries(self, *, known: int, others: int) -> None:
        """Count access log entries with a request id and those without (AccessLogObserver)."""
        self._entries_picked.inc(known)
        self._entries_other.inc(others)

    def access_log_unreadable(self) -> None:
        """Count a dropped access log batch (AccessLogObserver)."""
        self._unreadable.inc()

    def access_log_foreign(self, count: int) -> None:
        """Count ignored access log entries about another sender's requests (AccessLogObserver)."""
        self._foreign.inc(count)

    def access_log_undelivered(self, count: int) -> None:
        """Count access log entries of routers without a connection (AccessLogObserver)."""
        self._undelivered.inc(count)

    def pools_refused(self) -> None:
        """Count a rejected change of pools; the last valid pools stay in use."""
        self._pool_refusals.inc()

    def pool_file_refused(self, refused: bool) -> None:
        """Set whether any pool file is rejected or missing."""
        self._pool_file_refused.set(refused)


class _Scrape(Collector):
    """A collector for one scrape: the registry's metrics, and gauges from these statuses and signals."""

    def __init__(
        self,
        registry: CollectorRegistry,
        statuses: Sequence[PoolSnapshot],
        signals: Mapping[str, PoolSignals],
        replica_id: str,
    ) -> None:
        self._registry = registry
        self._replica_id = replica_id
        self._statuses = statuses
        self._signals = signals

    def collect(self) -> Iterator[Metric]:
        """Yield every metric family (prometheus_client's Collector)."""
        for family in self._registry.collect():
            # prometheus_client adds a creation time to each series. No reader needs the creation times, and they double
            # the page.
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family
        yield from _load_gauges(self._statuses, self._signals)
        yield _owners(self._statuses, self._replica_id)
        yield from _shadows(self._statuses)


def _load_gauges(statuses: Sequence[PoolSnapshot], signals: Mapping[str, PoolSignals]) -> Iterator[Metric]:
    """Yield every gauge of these pools and their endpoints; the keys of ``signals`` are pools."""
    for name, text, endpoint_value in _ENDPOINT_GAUGES:
        family = GaugeMetricFamily(f"dualmap_endpoint_{name}", text, labels=_ENDPOINT)
        for status in statuses:
            for endpoint in status.endpoints:
                value = endpoint_value(endpoint)
                if value is not None:
                    family.add_metric((status.pool, endpoint.id), value)
        yield family
    for name, text, pool_value in _POOL_GAUGES:
        family = GaugeMetricFamily(f"dualmap_{name}", text, labels=_POOL)
        for status in statuses:
            family.add_metric((status.pool,), pool_value(status))
        yield family
    for name, text, signal_value in _SIGNALS:
        family = GaugeMetricFamily(f"dualmap_pool_{name}", text, labels=_POOL)
        for pool, of_pool in signals.items():
            signal = signal_value(of_pool)
            if signal is not None:
                family.add_metric((pool,), signal)
        yield family
    yield _members(statuses)
    yield _kv_event_states(statuses)


def _kv_event_states(statuses: Sequence[PoolSnapshot]) -> Metric:
    text = "1 for the state of the endpoint's KV events, 0 for the other states."
    family = GaugeMetricFamily("dualmap_kv_event_state", text, labels=(*_ENDPOINT, "state"))
    for status in statuses:
        for endpoint in status.endpoints:
            if endpoint.events.state is not SourceState.OFF:
                for state in SourceState:
                    family.add_metric((status.pool, endpoint.id, state.value), endpoint.events.state is state)
    return family


def _owners(statuses: Sequence[PoolSnapshot], replica_id: str) -> Metric:
    text = "1 for the router that decides for the pool, as far as this router knows."
    family = GaugeMetricFamily("dualmap_pool_owner", text, labels=(*_POOL, "router"))
    for status in statuses:
        family.add_metric((status.pool, replica_of(status.owner) or replica_id), 1)
    return family


def _shadows(statuses: Sequence[PoolSnapshot]) -> Iterator[Metric]:
    """Yield the comparison of policies of each pool with shadow policies."""
    decisions = CounterMetricFamily(
        "dualmap_shadow_decisions",
        "Requests for which the policy chose, by whether it agrees with the pool's own choice of endpoint.",
        labels=(*_POLICY, "agreed"),
    )
    ttft_s = SummaryMetricFamily(
        "dualmap_shadow_predicted_ttft_seconds",
        "Predicted time to first token at the endpoint that the policy chose, in seconds.",
        labels=_POLICY,
    )
    cached_tokens = CounterMetricFamily(
        "dualmap_shadow_predicted_cached_tokens",
        "Prompt tokens predicted to be cached at the endpoint that the policy chose.",
        labels=_POLICY,
    )
    for status in statuses:
        for shadow in status.shadows:
            labels = status.pool, shadow.policy
            decisions.add_metric((*labels, "true"), shadow.agreed)
            decisions.add_metric((*labels, "false"), shadow.differed)
            ttft_s.add_metric(labels, shadow.agreed + shadow.differed, shadow.predicted_ttft_s)
            cached_tokens.add_metric(labels, shadow.predicted_cached_tokens)
    yield from (decisions, ttft_s, cached_tokens)


def _members(statuses: Sequence[PoolSnapshot]) -> Metric:
    family = GaugeMetricFamily("dualmap_ring_members", "Members of the pool, by state.", labels=(*_POOL, "state"))
    for status in statuses:
        states = [endpoint.state for endpoint in status.endpoints]
        for state in MemberState:
            family.add_metric((status.pool, state.value), states.count(state.value))
    return family
