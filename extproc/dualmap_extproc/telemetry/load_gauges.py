"""Each pool's load as Prometheus gauges, made from the routers' statuses and signals at the moment of a scrape.

``metrics`` counts what is reported to it and puts these beside it on the page. docs/metrics.md says what each means.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from prometheus_client.core import GaugeMetricFamily, Metric

from dualmap.pools.pool import MemberState
from dualmap.requests import EndpointStatus, PoolSnapshot
from dualmap.scaling.scaling import PoolSignals

_POOL: Final = ("pool",)
_ENDPOINT: Final = ("pool", "endpoint")

_EndpointGauge = tuple[str, str, Callable[[EndpointStatus], float]]
_PoolGauge = tuple[str, str, Callable[[PoolSnapshot], float]]
_Signal = tuple[str, str, Callable[[PoolSignals], float | None]]

# Name without its beginning ``dualmap_endpoint_``, what it says, and where it stands in a status.
_ENDPOINT_GAUGES: Final[tuple[_EndpointGauge, ...]] = (
    (
        "pending_prefill_tokens",
        "Uncached prompt tokens sent and not yet prefilled.",
        lambda endpoint: endpoint.pending_prefill_tokens,
    ),
    ("in_flight_requests", "Requests sent and not yet ended.", lambda endpoint: endpoint.in_flight),
    ("held_requests", "Requests that wait in this router for the endpoint.", lambda endpoint: endpoint.held),
    (
        "held_prefill_tokens",
        "Uncached prompt tokens of the requests that wait for the endpoint.",
        lambda endpoint: endpoint.held_prefill_tokens,
    ),
    ("active_kv_tokens", "Prompt tokens of the requests in flight.", lambda endpoint: endpoint.active_kv_tokens),
    (
        "prefill_tokens_per_second",
        "Prefill speed as learnt from first tokens.",
        # Learnt as a quotient of averages: digits beyond these mean nothing.
        lambda endpoint: round(endpoint.prefill_tokens_per_second, 1),
    ),
    (
        "solo_prefill_tokens_per_second",
        "Prefill speed where no other router's prefills come between: by it instances are wished for.",
        lambda endpoint: round(endpoint.solo_tokens_per_second, 1),
    ),
    (
        "indexed_blocks",
        "Prompt blocks this router believes the endpoint caches.",
        lambda endpoint: endpoint.indexed_blocks,
    ),
    ("weight", "Weight on the rings.", lambda endpoint: endpoint.weight),
    ("suspended", "1 while the endpoint is left alone after failures.", lambda endpoint: endpoint.suspended),
)
# The same of pools, their names beginning with ``dualmap_``.
_POOL_GAUGES: Final[tuple[_PoolGauge, ...]] = (
    ("pool_held_requests", "Requests that wait in this router.", lambda status: status.held),
    ("pool_sessions", "Sessions whose endpoint this router remembers.", lambda status: status.sessions),
    ("pool_peers", "Other routers heard of lately.", lambda status: status.peers),
    ("ring_version", "Ring version this router has applied.", lambda status: status.ring_version),
    ("hotness_nodes", "Prefixes whose traffic share is tracked.", lambda status: status.hotness_nodes),
    ("split_prefixes", "Hot prefixes whose key is longer.", lambda status: status.split_prefixes),
)
# What autoscalers look at, after ``dualmap_pool_``; they are rates and shares, of which further digits mean nothing.
_SIGNALS: Final[tuple[_Signal, ...]] = (
    (
        "pending_prefill_tokens_per_endpoint",
        "Uncached prompt tokens that wait for their first token, held ones included, for each endpoint.",
        lambda signals: round(signals.pending_prefill_tokens_per_endpoint, 1),
    ),
    (
        "arriving_uncached_tokens_per_second",
        "Prompt tokens that arrive and are not cached.",
        lambda signals: round(signals.arriving_uncached_tokens_per_second, 1),
    ),
    (
        "slo_attainment",
        "Share of the last minute's first tokens that came in time.",
        lambda signals: None if signals.slo_attainment is None else round(signals.slo_attainment, 4),
    ),
    (
        "desired_replicas",
        "This router's share of the instances needed: add all routers', then round up.",
        lambda signals: round(signals.desired_replicas, 3),
    ),
)


def load_gauges(statuses: Sequence[PoolSnapshot], signals: Mapping[str, PoolSignals]) -> Iterator[Metric]:
    """Yield every gauge of these pools and their endpoints; ``signals`` by pool."""
    for name, text, endpoint_value in _ENDPOINT_GAUGES:
        family = GaugeMetricFamily(f"dualmap_endpoint_{name}", text, labels=_ENDPOINT)
        for status in statuses:
            for endpoint in status.endpoints:
                family.add_metric((status.pool, endpoint.id), endpoint_value(endpoint))
        yield family
    for name, text, pool_value in _POOL_GAUGES:
        family = GaugeMetricFamily(f"dualmap_{name}", text, labels=_POOL)
        for status in statuses:
            family.add_metric((status.pool,), pool_value(status))
        yield family
    for name, text, signal_value in _SIGNALS:
        family = GaugeMetricFamily(f"dualmap_pool_{name}", text, labels=_POOL)
        for pool, of_pool in signals.items():
            value = signal_value(of_pool)
            if value is not None:
                family.add_metric((pool,), value)
        yield family
    yield _members(statuses)


def _members(statuses: Sequence[PoolSnapshot]) -> Metric:
    family = GaugeMetricFamily("dualmap_ring_members", "Members, by state.", labels=(*_POOL, "state"))
    for status in statuses:
        states = [endpoint.state for endpoint in status.endpoints]
        for state in MemberState:
            family.add_metric((status.pool, state.value), states.count(state.value))
    return family
