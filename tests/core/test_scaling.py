"""Tests of desired replicas for arrivals and backlog. test_scaling_attainment.py tests attainment."""

import tracemalloc
from dataclasses import replace
from math import ceil
from random import Random

import pytest

from core.scalings import SPEED, TOKENS, desired, pool, status, steady
from dualmap.pools.pool import Engine
from dualmap.scaling.scaling import WINDOW_S, Scaling


class TestArrivals:
    def test_desired_replicas_keep_members_at_half_utilization(self) -> None:
        scaling = Scaling(pool())
        steady(scaling, rate=10, since=0, until=300)
        got = scaling.signals(300, status())
        assert got.arriving_uncached_tokens_per_second == pytest.approx(20_000, rel=0.01)
        # 20 000 tokens/s, plus 3 % for the attention, at 10 000 tokens/s per instance.
        assert got.desired_replicas == pytest.approx(2 * 2 * 1.03, rel=0.01)

    def test_desired_replicas_double_at_half_the_speed(self) -> None:
        scaling = Scaling(pool())
        steady(scaling, rate=10, since=0, until=300)
        assert desired(scaling, 300, status(speed=SPEED / 2)) == pytest.approx(2 * desired(scaling, 300, status()))

    def test_desired_replicas_use_the_solo_prefill_speed(self) -> None:
        scaling = Scaling(pool())
        steady(scaling, rate=10, since=0, until=300)
        assert desired(scaling, 300, status(beside_others=SPEED / 2)) == desired(scaling, 300, status())

    def test_scaling_signals_read_often_do_not_grow_memory(self) -> None:
        """KEDA, Prometheus, the dashboard and other routers may read the signals at any rate."""
        often, seldom, before = Scaling(pool()), Scaling(pool()), Scaling(pool())
        for scaling in (often, seldom, before):
            steady(scaling, rate=10, since=0, until=300)
        # The test excludes memory that the first calls allocate once.
        for n in range(2000):
            desired(before, 300 + n / 200, status(waiting=5))
        tracemalloc.start()
        for n in range(2000):
            desired(often, 300 + n / 200, status(waiting=5))
        kept, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        for n in range(10):
            desired(seldom, 300.0 + n, status(waiting=5))
        assert kept < 20_000
        assert desired(often, 310, status(waiting=5)) == desired(seldom, 310, status(waiting=5))

    def test_desired_replicas_grow_with_the_cost_of_long_contexts(self) -> None:
        short, long = Scaling(pool()), Scaling(pool())
        steady(short, rate=10, since=0, until=300)
        steady(long, rate=10, since=0, until=300, cached=20_000)
        one, other = short.signals(300, status()), long.signals(300, status())
        assert other.arriving_uncached_tokens_per_second == one.arriving_uncached_tokens_per_second
        assert other.desired_replicas > 1.5 * one.desired_replicas

    def test_desired_replicas_without_traffic_are_zero(self) -> None:
        assert desired(Scaling(pool()), 100, status()) == 0.0

    def test_desired_replicas_are_zero_a_window_after_traffic(self) -> None:
        scaling = Scaling(pool())
        steady(scaling, rate=10, since=0, until=298)
        assert 0 < desired(scaling, 330, status()) < desired(scaling, 298, status())
        assert desired(scaling, 298 + WINDOW_S, status()) == 0.0

    def test_desired_replicas_for_a_single_small_request_are_1(self) -> None:
        scaling = Scaling(pool())
        scaling.window.add(1000, uncached_tokens=0, cached_tokens=100)
        assert ceil(desired(scaling, 1001, status())) == 1

    def test_traffic_surge_is_half_counted_in_a_quarter_of_the_window(self) -> None:
        scaling = Scaling(pool())
        steady(scaling, rate=10, since=0, until=300)
        before = desired(scaling, 300, status())
        steady(scaling, rate=20, since=300, until=315)
        assert desired(scaling, 315, status()) > 1.5 * before
        steady(scaling, rate=20, since=315, until=300 + WINDOW_S)
        assert desired(scaling, 300 + WINDOW_S, status()) == pytest.approx(2 * before, rel=0.02)

    def test_random_traffic_variation_is_no_surge_at_any_router_count(self) -> None:
        """Requests of very different sizes arrive at random, a quarter of the requests at each of four routers."""
        draw, whole, shares = Random(7), Scaling(pool()), [Scaling(pool()) for _ in range(4)]
        now, alone, together = 0.0, [], []
        for sync_s in range(15, 1800, 15):
            while now < sync_s:
                now += draw.expovariate(8)
                tokens = round(TOKENS * draw.expovariate(1))
                for scaling in (whole, draw.choice(shares)):
                    scaling.window.add(now, uncached_tokens=tokens, cached_tokens=0)
            alone.append(desired(whole, now, status()))
            together.append(sum(desired(each, now, status(peers=3)) for each in shares))
        mean = 2 * 8 * TOKENS / SPEED
        assert sum(alone) / len(alone) == pytest.approx(1.06 * mean, rel=0.05)
        assert sum(together) <= 1.01 * sum(alone)

    def test_new_router_rate_excludes_time_before_its_start(self) -> None:
        scaling = Scaling(pool())
        steady(scaling, rate=10, since=1000, until=1030)
        got = scaling.signals(1030, status()).arriving_uncached_tokens_per_second
        assert got == pytest.approx(20_000, rel=0.02)

    def test_new_router_computes_no_rate_from_the_first_request(self) -> None:
        scaling = Scaling(pool())
        scaling.window.add(1000, uncached_tokens=TOKENS, cached_tokens=0)
        assert scaling.signals(1000, status()).arriving_uncached_tokens_per_second <= TOKENS / 10

    def test_arrival_rate_includes_rejected_requests(self) -> None:
        scaling = Scaling(pool())
        steady(scaling, rate=10, since=0, until=300)
        before = desired(scaling, 300, status())
        for second in range(300, 400):
            steady(scaling, rate=10, since=second, until=second + 1)
            for _ in range(10):
                scaling.window.reject(second + 0.9)
        assert desired(scaling, 400, status()) == pytest.approx(2 * before, rel=0.02)

    def test_arrival_rate_counts_queued_requests_at_arrival(self) -> None:
        scaling = Scaling(pool())
        steady(scaling, rate=10, since=0, until=300)
        before, held, asked = desired(scaling, 300, status()), 0, []
        for second in range(300, 390):
            # The arrival rate triples for half a minute; requests above the instances' capacity queue.
            steady(scaling, rate=15, since=second, until=second + 1)
            held += 15 if second < 330 else -5 if held else 0
            asked.append(desired(scaling, second + 1, status(waiting=held)) / before)
        assert asked[14] > 1.7
        assert 2.0 < max(asked) < 3.0
        # For a minute, 10 requests per second have arrived, but 15 per second were dispatched.
        assert asked[-1] == pytest.approx(1.0, rel=0.1)

    def test_outage_rejecting_every_request_keeps_desired_replicas(self) -> None:
        scaling = Scaling(pool())
        steady(scaling, rate=10, since=0, until=300)
        before = desired(scaling, 300, status())
        for n in range(6000):
            scaling.window.reject(300 + n / 10)
        assert desired(scaling, 900, status(0)) == pytest.approx(before, rel=0.02)

    def test_empty_pool_uses_the_configured_speed(self) -> None:
        scaling = Scaling(pool())
        steady(scaling, rate=10, since=0, until=300)
        assert desired(scaling, 300, status(0)) == desired(scaling, 300, status())

    def test_empty_pool_with_rejected_request_desires_one_member(self) -> None:
        scaling = Scaling(pool(0))
        assert ceil(desired(scaling, 100, status(0, waiting=1))) == 1
        scaling.window.reject(100)
        assert ceil(desired(scaling, 101, status(0))) == 1

    def test_scaling_uses_changed_slo_and_speed(self) -> None:
        scaling = Scaling(pool())
        steady(scaling, rate=10, since=0, until=300)
        before = desired(scaling, 300, status(0))
        scaling.adopt(replace(pool(), engine=Engine(prefill_tokens_per_second=2 * SPEED)))
        assert desired(scaling, 300, status(0)) == pytest.approx(before / 2)

    def test_desired_replicas_of_all_routers_add_up(self) -> None:
        whole, half = Scaling(pool()), Scaling(pool())
        steady(whole, rate=10, since=0, until=300)
        steady(half, rate=5, since=0, until=300)
        one = whole.signals(300, status(pending=40_000))
        share = half.signals(300, status(pending=20_000, peers=1))
        assert 2 * share.desired_replicas == pytest.approx(one.desired_replicas, rel=0.01)
        assert 2 * share.pending_prefill_tokens_per_endpoint == one.pending_prefill_tokens_per_endpoint


class TestBacklog:
    def test_backlog_within_the_slo_adds_no_members(self) -> None:
        scaling = Scaling(pool())
        steady(scaling, rate=10, since=0, until=300)
        # 20 000 tokens/s, with a maximum wait of 5 s.
        assert desired(scaling, 300, status(pending=24_000)) == desired(scaling, 300, status())

    def test_backlog_beyond_the_slo_is_computed_in_a_window(self) -> None:
        scaling = Scaling(pool())
        steady(scaling, rate=10, since=0, until=300)
        before = desired(scaling, 300, status())
        late = desired(scaling, 300, status(held=25_000 + 150_000))
        assert late - before == pytest.approx(4 * 150_000 * 1.03 / WINDOW_S / SPEED, rel=0.01)

    def test_pending_tokens_exclude_draining_and_include_queued(self) -> None:
        whole = status(pending=1000, held=500, draining=2)
        busy = tuple(replace(each, pending_prefill_tokens=9000) for each in whole.endpoints[2:])
        got = Scaling(pool()).signals(100, replace(whole, endpoints=whole.endpoints[:2] + busy))
        assert got.pending_prefill_tokens_per_endpoint == 1500

    def test_pending_tokens_of_an_empty_pool_are_zero(self) -> None:
        assert Scaling(pool(0)).signals(100, status(0)).pending_prefill_tokens_per_endpoint == 0
