"""Tests of the router's counters: the events that increment them, and the removal of their series."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import pytest

import builders
from dualmap.pools.pool import Member
from dualmap.requests import Reason, Rejection
from dualmap.router import PoolRouter
from dualmap_extproc.envoy.access_log.sink import AccessLogObserver
from dualmap_extproc.envoy.discovery.service import DiscoveryObserver
from dualmap_extproc.errors import no_endpoint, refused_by_router
from dualmap_extproc.request.observations import (
    Accepted,
    Enqueued,
    FanOut,
    Logged,
    MembersDeparted,
    Observation,
    OwnerChanged,
    PoolsChanged,
)
from dualmap_extproc.store.contract import Failure
from dualmap_extproc.store.exchange import StoreObserver
from dualmap_extproc.store.metrics import StoreMetrics
from dualmap_extproc.telemetry.counts import Traffic
from extproc.metrics_pages import (
    POOL,
    completion,
    decision,
    everything,
    families,
    first_token,
    metrics,
    samples,
    status,
)


class TestCounting:
    def test_metrics_implement_the_observers_of_the_data_path(self) -> None:
        made = metrics().metrics
        ports: tuple[DiscoveryObserver, AccessLogObserver] = (made, made)
        for port in (DiscoveryObserver, AccessLogObserver):
            for name in [each for each in vars(port) if not each.startswith("_")]:
                assert callable(getattr(made, name))
        assert ports[0] is made

    def test_metrics_subscribe_to_every_observation_that_is_counted(self) -> None:
        class Kinds(FanOut):
            def subscribe(self, kind: type[Any], handler: Callable[[Any], None]) -> None:
                kinds.add(kind)

        kinds: set[type] = set()
        metrics().metrics.subscribe(Kinds())
        uncounted = {Accepted, Enqueued, Logged, MembersDeparted, OwnerChanged, PoolsChanged}
        assert kinds == set(get_args(Observation)) - uncounted

    @pytest.mark.parametrize("queued_s", [None, 3.0])
    def test_metrics_measure_queue_time_only_of_queued_requests(self, queued_s: float | None) -> None:
        made = metrics()
        made.routed(POOL, decision(), queued_s=queued_s)
        made.refused(no_endpoint(POOL), queued_s=queued_s)
        count = 0 if queued_s is None else 2
        got = samples(made)
        assert got[f"dualmap_held_seconds_count{{pool={POOL}}}"] == count
        assert got[f"dualmap_held_seconds_sum{{pool={POOL}}}"] == 3.0 * count

    def test_metrics_count_each_event_in_its_counter(self) -> None:
        made = metrics()
        before = samples(made)
        everything(made)
        after = samples(made)
        changed = {name: value - before.get(name, 0) for name, value in after.items() if value != before.get(name)}
        at = f"endpoint=m-0,pool={POOL}"
        assert {name: value for name, value in changed.items() if "_seconds" not in name} == {
            f"dualmap_requests_total{{{at}}}": 1,
            f"dualmap_prompt_tokens_total{{{at}}}": 100,
            f"dualmap_predicted_cached_tokens_total{{{at}}}": 60,
            f"dualmap_checked_cached_tokens_total{{{at}}}": 60,
            f"dualmap_measured_cached_tokens_total{{{at}}}": 50,
            f"dualmap_predicted_hit_requests_total{{{at}}}": 1,
            f"dualmap_first_tokens_total{{{at},slo=met}}": 1,
            f"dualmap_completions_total{{endpoint=m-0,outcome=finished,pool={POOL}}}": 1,
            f"dualmap_completions_total{{endpoint=m-0,outcome=rejected,pool={POOL}}}": 1,
            f"dualmap_completions_total{{endpoint=m-0,outcome=aborted,pool={POOL}}}": 1,
            f"dualmap_completions_total{{endpoint=m-0,outcome=failed,pool={POOL}}}": 1,
            f"dualmap_prefills_total{{pool={POOL},where=short}}": 1,
            f"dualmap_completions_total{{endpoint=m-0,outcome=expired,pool={POOL}}}": 1,
            f"dualmap_decisions_total{{pool={POOL},rule=pair-warm}}": 1,
            f"dualmap_bodiless_requests_total{{pool={POOL}}}": 1,
            f"dualmap_served_elsewhere_total{{pool={POOL}}}": 1,
            f"dualmap_picks_not_followed_total{{pool={POOL}}}": 1,
            f"dualmap_clients_limited_total{{pool={POOL}}}": 1,
            f"dualmap_refused_requests_total{{code=no_endpoint,pool={POOL}}}": 1,
            "dualmap_refused_requests_total{code=model_not_found,pool=}": 1,
            "dualmap_discovery_streams{}": 3,
            "dualmap_discovery_pushes_total{}": 1,
            "dualmap_discovery_rejections_total{}": 1,
            "dualmap_access_log_entries_total{picked=yes}": 5,
            "dualmap_access_log_entries_total{picked=no}": 2,
            "dualmap_access_log_unreadable_batches_total{}": 1,
            "dualmap_pool_refusals_total{}": 1,
            "dualmap_pool_file_refused{}": 1,
        }
        assert changed[f"dualmap_ttft_seconds_sum{{pool={POOL}}}"] == pytest.approx(0.3)
        assert changed[f"dualmap_ttft_seconds_count{{pool={POOL}}}"] == 1
        assert changed[f"dualmap_predicted_ttft_seconds_sum{{pool={POOL}}}"] == pytest.approx(0.2)
        assert changed[f"dualmap_predicted_ttft_seconds_count{{pool={POOL}}}"] == 1
        assert changed[f"dualmap_held_seconds_sum{{pool={POOL}}}"] == 1.5
        assert changed[f"dualmap_held_seconds_bucket{{le=2.0,pool={POOL}}}"] == 1
        assert changed["dualmap_decision_seconds_sum{}"] == pytest.approx(0.0003)

    def test_metrics_count_first_tokens_within_and_beyond_the_slo(self) -> None:
        made = metrics()
        made.first_token(POOL, first_token("m-1", within_slo=True))
        made.first_token(POOL, first_token("m-1", within_slo=False, ttft_s=7))
        made.first_token(POOL, first_token("m-1", within_slo=False, ttft_s=9))
        got = samples(made)
        assert got[f"dualmap_first_tokens_total{{endpoint=m-1,pool={POOL},slo=met}}"] == 1
        assert got[f"dualmap_first_tokens_total{{endpoint=m-1,pool={POOL},slo=missed}}"] == 2
        assert got[f"dualmap_ttft_seconds_bucket{{le=5.0,pool={POOL}}}"] == 1

    def test_metrics_observe_no_tokens_of_completion_without_usage(self) -> None:
        made = metrics()
        before = samples(made)
        made.measured(POOL, completion(measured=None))
        assert samples(made) == before

    @pytest.mark.parametrize(
        ("predicted", "measured", "hits"), [(60, 0, (1, 1)), (60, 16, (1, 0)), (0, 0, (0, 0)), (60, None, (0, 0))]
    )
    def test_metrics_count_predicted_hits_without_cached_tokens_as_stale(
        self, predicted: int, measured: int | None, hits: tuple[int, int]
    ) -> None:
        made = metrics()
        made.measured(POOL, completion(measured=measured)._replace(predicted_cached_tokens=predicted))
        got, at = samples(made), f"endpoint=m-0,pool={POOL}"
        names = ("dualmap_predicted_hit_requests_total", "dualmap_stale_hit_requests_total")
        assert tuple(got[f"{name}{{{at}}}"] for name in names) == hits

    def test_metrics_endpoint_series_exist_before_the_first_request(self) -> None:
        """The series starts at 0, so that Prometheus' rate includes the first request."""
        got = samples(metrics())
        assert got[f"dualmap_requests_total{{endpoint=m-1,pool={POOL}}}"] == 0
        assert got[f"dualmap_completions_total{{endpoint=m-1,outcome=aborted,pool={POOL}}}"] == 0

    def test_metrics_instances_share_no_state(self) -> None:
        one, other = metrics(), metrics()
        everything(one)
        assert samples(other) == samples(metrics())

    def test_metrics_page_has_router_name_but_no_creation_times(self) -> None:
        got = samples(metrics())
        assert got["dualmap_build_info{replica=router-0,version=1.2.3}"] == 1
        assert not [name for name in got if "_created" in name]

    @pytest.mark.parametrize("reason", [Reason.QUEUE_FULL, Reason.WAITED_TOO_LONG])
    def test_metrics_count_rejections_by_reason(self, reason: Reason) -> None:
        made = metrics()
        made.refused(refused_by_router(POOL, Rejection(request_id="r", reason=reason)))
        assert samples(made)[f"dualmap_refused_requests_total{{code={reason.value},pool={POOL}}}"] == 1
        assert made.traffic(POOL).refused == 1

    def test_metrics_of_pool_without_queue_show_zero_queued(self) -> None:
        """An absent gauge would look like an absent router."""
        assert (
            samples(metrics(), PoolRouter(builders.pool(2)).status())[f"dualmap_pool_held_requests{{pool={POOL}}}"] == 0
        )

    def test_metrics_traffic_totals_equal_the_sums_of_series(self) -> None:
        made = metrics()
        everything(made)
        made.first_token(POOL, first_token(within_slo=False))
        assert made.traffic(POOL) == Traffic(
            requests=1,
            refused=1,
            first_tokens=2,
            slo_met=1,
            prompt_tokens=100,
            predicted_cached_tokens=60,
            measured_cached_tokens=50,
        )
        assert made.traffic("llm/unknown") == Traffic()


def test_metrics_slo_gauge_updates_with_the_pool() -> None:
    pool = builders.pool(2)
    made = metrics(pool)
    made.set_pools([replace(pool, slo=replace(pool.slo, ttft_s=2.5, attainment=0.95))])
    got = samples(made)
    assert got[f"dualmap_pool_slo_ttft_seconds{{pool={POOL}}}"] == 2.5
    assert got[f"dualmap_pool_slo_goal{{pool={POOL}}}"] == 0.95


class TestRemovedSeries:
    def test_metrics_removed_member_loses_its_series(self) -> None:
        whole = builders.pool(2)
        made = metrics(whole)
        for member in ("m-0", "m-1"):
            made.routed(POOL, decision(member))
            made.finished(POOL, completion(member))
        made.set_pools([replace(whole, members=whole.members[1:])])
        got = samples(made, status())
        assert not [name for name in got if "endpoint=m-0" in name]
        assert got[f"dualmap_requests_total{{endpoint=m-1,pool={POOL}}}"] == 1
        assert made.traffic(POOL).requests == 2

    def test_metrics_late_event_does_not_recreate_removed_series(self) -> None:
        whole = builders.pool(2)
        made = metrics(whole)
        made.set_pools([replace(whole, members=whole.members[1:])])
        everything(made)
        assert not [name for name in samples(made) if "endpoint=m-0" in name]
        assert made.traffic(POOL).requests == 1

    def test_metrics_removed_pool_loses_all_series(self) -> None:
        made = metrics()
        everything(made)
        made.set_pools([])
        assert not [name for name in samples(made) if POOL in name]
        everything(made)
        assert not [name for name in samples(made) if POOL in name]

    def test_metrics_member_that_returns_starts_at_zero(self) -> None:
        made = metrics()
        everything(made)
        made.set_pools([])
        made.set_pools([builders.pool(2)])
        assert samples(made)[f"dualmap_requests_total{{endpoint=m-0,pool={POOL}}}"] == 0
        assert made.traffic(POOL) == Traffic()

    def test_metrics_are_unchanged_after_an_update_with_equal_pools(self) -> None:
        made = metrics()
        everything(made)
        before = samples(made)
        made.set_pools([builders.pool(2)])
        assert samples(made) == before

    def test_metrics_printable_ids_are_escaped(self) -> None:
        odd = 'a/b:c@d"e\\f'
        made = metrics(replace(builders.pool(0), members=(Member(id=odd, address="10.0.0.1", port=1),)))
        assert [
            sample.labels["endpoint"]
            for family in families(made)
            for sample in family.samples
            if sample.name == "dualmap_requests_total"
        ] == [odd]


def test_store_metrics_count_exchanges_and_failures() -> None:
    made = metrics()
    assert not any("dualmap_store" in name for name in samples(made))
    store: StoreObserver = StoreMetrics(made.metrics.registry)
    assert samples(made)["dualmap_store_up{}"] == 0
    store.exchanged(0.003)
    assert samples(made)["dualmap_store_up{}"] == 1
    store.failed(Failure.READ_ONLY)
    store.unreadable(2)
    store.dropped(3)
    found = samples(made)
    assert found["dualmap_store_up{}"] == 0
    assert found["dualmap_store_errors_total{kind=read_only}"] == 1
    assert found["dualmap_store_errors_total{kind=timeout}"] == 0
    assert found["dualmap_store_exchange_seconds_bucket{le=0.005}"] == 1
    assert found["dualmap_store_unreadable_entries_total{}"] == 2
    assert found["dualmap_store_dropped_news_total{}"] == 3
