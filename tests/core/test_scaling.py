"""The rule for desired replicas: in single situations, and in a closed loop with an HPA and a simple queue."""

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import ceil
from random import Random

import pytest

import builders
from dualmap.pool import Engine, MemberState, Pool
from dualmap.requests import EndpointStatus, PoolStatus
from dualmap.scaling import WINDOW_S, Scaling

SPEED = 10_000.0
TOKENS = 2000


def pool(members: int = 4) -> Pool:
    return builders.pool(members, engine=Engine(prefill_tokens_per_second=SPEED))


def status(
    members: int = 4,
    *,
    pending: int = 0,
    held: int = 0,
    waiting: int = 0,
    peers: int = 0,
    speed: float = SPEED,
    draining: int = 0,
) -> PoolStatus:
    """A pool whose members have ``pending`` and ``held`` tokens each; the last ``draining`` of them leave."""
    endpoints = tuple(
        EndpointStatus(
            id=f"m-{n}",
            endpoint=f"10.0.0.{n + 1}:8000",
            state=(MemberState.DRAINING if n >= members - draining else MemberState.ACTIVE).value,
            weight=100,
            in_flight=0,
            held=0,
            pending_prefill_tokens=pending,
            held_prefill_tokens=held,
            active_kv_tokens=0,
            indexed_blocks=0,
            prefill_tokens_per_second=speed,
            suspended=False,
        )
        for n in range(members)
    )
    return PoolStatus(
        pool="llm/qwen",
        ring_version=1,
        held=waiting,
        sessions=0,
        peers=peers,
        endpoints=endpoints,
        hotness_nodes=0,
        split_prefixes=0,
    )


def steady(scaling: Scaling, *, rate: float, since: float, until: float, cached: int = 0) -> None:
    """Send ``rate`` requests a second of TOKENS uncached tokens."""
    for n in range(round(rate * (until - since))):
        scaling.window.add(since + n / rate, uncached_tokens=TOKENS, cached_tokens=cached)


def desired(scaling: Scaling, now: float, state: PoolStatus) -> float:
    return scaling.signals(now, state).desired_replicas


class TestArrivals:
    def test_the_wish_is_what_keeps_instances_half_busy(self) -> None:
        scaling = Scaling(pool())
        steady(scaling, rate=10, since=0, until=300)
        got = scaling.signals(300, status())
        assert got.arriving_uncached_tokens_per_second == pytest.approx(20_000, rel=0.01)
        # 20 000 tokens/s that cost 3 % more for their attention, of 10 000 tokens/s each.
        assert got.desired_replicas == pytest.approx(2 * 2 * 1.03, rel=0.01)

    def test_it_is_twice_as_large_at_half_the_measured_speed(self) -> None:
        scaling = Scaling(pool())
        steady(scaling, rate=10, since=0, until=300)
        assert desired(scaling, 300, status(speed=SPEED / 2)) == pytest.approx(2 * desired(scaling, 300, status()))

    def test_tokens_behind_a_long_context_count_for_what_they_cost(self) -> None:
        short, long = Scaling(pool()), Scaling(pool())
        steady(short, rate=10, since=0, until=300)
        steady(long, rate=10, since=0, until=300, cached=20_000)
        one, other = short.signals(300, status()), long.signals(300, status())
        assert other.arriving_uncached_tokens_per_second == one.arriving_uncached_tokens_per_second
        assert other.desired_replicas > 1.5 * one.desired_replicas

    def test_no_traffic_asks_for_nothing(self) -> None:
        assert desired(Scaling(pool()), 100, status()) == 0.0

    def test_traffic_that_has_ended_asks_for_nothing_a_window_later(self) -> None:
        scaling = Scaling(pool())
        steady(scaling, rate=10, since=0, until=298)
        assert 0 < desired(scaling, 330, status()) < desired(scaling, 298, status())
        assert desired(scaling, 298 + WINDOW_S, status()) == 0.0

    def test_one_small_request_asks_for_one_instance(self) -> None:
        scaling = Scaling(pool())
        scaling.window.add(1000, uncached_tokens=0, cached_tokens=100)
        assert ceil(desired(scaling, 1001, status())) == 1

    def test_a_surge_is_half_noticed_within_a_quarter_of_the_window(self) -> None:
        scaling = Scaling(pool())
        steady(scaling, rate=10, since=0, until=300)
        before = desired(scaling, 300, status())
        steady(scaling, rate=20, since=300, until=315)
        assert desired(scaling, 315, status()) > 1.5 * before
        steady(scaling, rate=20, since=315, until=300 + WINDOW_S)
        assert desired(scaling, 300 + WINDOW_S, status()) == pytest.approx(2 * before, rel=0.02)

    def test_chance_is_no_surge_however_many_routers_look_at_it(self) -> None:
        """Requests of very different size come at random, a quarter of them through each of four routers."""
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

    def test_a_router_that_has_just_begun_does_not_take_its_silence_for_the_pools(self) -> None:
        scaling = Scaling(pool())
        steady(scaling, rate=10, since=1000, until=1030)
        got = scaling.signals(1030, status()).arriving_uncached_tokens_per_second
        assert got == pytest.approx(20_000, rel=0.02)

    def test_a_first_request_is_not_taken_for_a_rate(self) -> None:
        scaling = Scaling(pool())
        scaling.window.add(1000, uncached_tokens=TOKENS, cached_tokens=0)
        assert scaling.signals(1000, status()).arriving_uncached_tokens_per_second <= TOKENS / 10

    def test_requests_refused_for_want_of_room_count_like_the_others(self) -> None:
        scaling = Scaling(pool())
        steady(scaling, rate=10, since=0, until=300)
        before = desired(scaling, 300, status())
        for second in range(300, 400):
            steady(scaling, rate=10, since=second, until=second + 1)
            for _ in range(10):
                scaling.window.refuse(second + 0.9)
        assert desired(scaling, 400, status()) == pytest.approx(2 * before, rel=0.02)

    def test_requests_that_are_held_arrive_when_they_come_and_not_when_they_go(self) -> None:
        scaling = Scaling(pool())
        steady(scaling, rate=10, since=0, until=300)
        before, held, asked = desired(scaling, 300, status()), 0, []
        for second in range(300, 390):
            # Three times as many come for half a minute, of which instances take what they can do.
            steady(scaling, rate=15, since=second, until=second + 1)
            held += 15 if second < 330 else -5 if held else 0
            asked.append(desired(scaling, second + 1, status(waiting=held)) / before)
        assert asked[14] > 1.7
        assert 2.0 < max(asked) < 3.0
        # 10 a second have come for a minute, though 15 went.
        assert asked[-1] == pytest.approx(1.0, rel=0.1)

    def test_an_outage_that_refuses_everybody_does_not_ask_for_less(self) -> None:
        scaling = Scaling(pool())
        steady(scaling, rate=10, since=0, until=300)
        before = desired(scaling, 300, status())
        for n in range(6000):
            scaling.window.refuse(300 + n / 10)
        assert desired(scaling, 900, status(0)) == pytest.approx(before, rel=0.02)

    def test_without_members_the_stated_speed_counts(self) -> None:
        scaling = Scaling(pool())
        steady(scaling, rate=10, since=0, until=300)
        assert desired(scaling, 300, status(0)) == desired(scaling, 300, status())

    def test_who_knocks_at_an_empty_pool_asks_for_one_instance(self) -> None:
        scaling = Scaling(pool(0))
        assert ceil(desired(scaling, 100, status(0, waiting=1))) == 1
        scaling.window.refuse(100)
        assert ceil(desired(scaling, 101, status(0))) == 1

    def test_a_changed_objective_and_speed_are_taken(self) -> None:
        scaling = Scaling(pool())
        steady(scaling, rate=10, since=0, until=300)
        before = desired(scaling, 300, status(0))
        scaling.adopt(replace(pool(), engine=Engine(prefill_tokens_per_second=2 * SPEED)))
        assert desired(scaling, 300, status(0)) == pytest.approx(before / 2)

    def test_routers_shares_add_up(self) -> None:
        whole, half = Scaling(pool()), Scaling(pool())
        steady(whole, rate=10, since=0, until=300)
        steady(half, rate=5, since=0, until=300)
        one = whole.signals(300, status(pending=40_000))
        share = half.signals(300, status(pending=20_000, peers=1))
        assert 2 * share.desired_replicas == pytest.approx(one.desired_replicas, rel=0.01)
        assert 2 * share.pending_prefill_tokens_per_endpoint == one.pending_prefill_tokens_per_endpoint


class TestBacklog:
    def test_what_waits_within_the_slo_asks_for_nothing_more(self) -> None:
        scaling = Scaling(pool())
        steady(scaling, rate=10, since=0, until=300)
        # 20 000 tokens/s of which each may wait for 5 s.
        assert desired(scaling, 300, status(pending=24_000)) == desired(scaling, 300, status())

    def test_what_will_be_late_is_to_be_worked_off_within_a_window(self) -> None:
        scaling = Scaling(pool())
        steady(scaling, rate=10, since=0, until=300)
        before = desired(scaling, 300, status())
        late = desired(scaling, 300, status(held=25_000 + 150_000))
        assert late - before == pytest.approx(4 * 150_000 * 1.03 / WINDOW_S / SPEED, rel=0.01)

    def test_pending_tokens_are_of_those_that_stay_and_include_the_held(self) -> None:
        whole = status(pending=1000, held=500, draining=2)
        busy = tuple(replace(each, pending_prefill_tokens=9000) for each in whole.endpoints[2:])
        got = Scaling(pool()).signals(100, replace(whole, endpoints=whole.endpoints[:2] + busy))
        assert got.pending_prefill_tokens_per_endpoint == 1500

    def test_an_empty_pool_has_none(self) -> None:
        assert Scaling(pool(0)).signals(100, status(0)).pending_prefill_tokens_per_endpoint == 0


class TestAttainment:
    def asked(
        self, *, share_met: float, members: int, rate: float = 10, peers: int = 0, first_tokens: int = 10
    ) -> list[float]:
        """What is desired every 15 s for ten minutes, while that share of first tokens is in time."""
        scaling = Scaling(pool())
        asked = []
        for second in range(600):
            steady(scaling, rate=rate, since=second, until=second + 1)
            for n in range(first_tokens):
                scaling.window.first_token(second, within_slo=n < share_met * first_tokens)
            if second % 15 == 14:
                asked.append(desired(scaling, second + 1, status(members, peers=peers)))
        return asked

    def test_it_is_the_share_of_first_tokens_in_time(self) -> None:
        scaling = Scaling(pool())
        assert scaling.signals(0, status()).slo_attainment is None
        for n in range(10):
            scaling.window.first_token(100 + n, within_slo=n < 7)
        assert scaling.signals(110, status()).slo_attainment == 0.7
        assert scaling.signals(110 + WINDOW_S, status()).slo_attainment is None

    def test_a_met_slo_corrects_nothing(self) -> None:
        asked = self.asked(share_met=1.0, members=5)
        assert asked[-1] == pytest.approx(4.12, rel=0.01)

    def test_a_fleet_as_large_as_wished_that_misses_the_slo_is_too_small(self) -> None:
        asked = self.asked(share_met=0.5, members=5)
        assert asked[3] == pytest.approx(4.12, rel=0.01)  # Not before a window has passed since the members came.
        assert 5.5 < asked[-1] < 7

    def test_a_fleet_larger_than_the_arrivals_ask_for_is_too_small_too(self) -> None:
        assert self.asked(share_met=0.5, members=12)[4] > 12

    def test_a_fleet_that_is_not_there_yet_is_not_asked_for_twice(self) -> None:
        assert self.asked(share_met=0.5, members=3)[-1] == pytest.approx(4.12, rel=0.01)

    def test_each_router_asks_for_its_share_of_what_is_missing(self) -> None:
        alone, share = self.asked(share_met=0.5, members=12), self.asked(share_met=0.5, members=12, rate=5, peers=1)
        assert 2 * share[-1] == pytest.approx(alone[-1], rel=0.01)

    def test_a_few_late_requests_prove_nothing(self) -> None:
        scaling = Scaling(pool())
        for second in range(0, 300, 15):
            steady(scaling, rate=10, since=second, until=second + 15)
            scaling.window.first_token(second + 15, within_slo=False)
            last = desired(scaling, second + 15, status(5))
        assert last == pytest.approx(4.12, rel=0.01)

    def test_what_was_added_stays_while_the_slo_is_just_met(self) -> None:
        scaling = Scaling(pool())
        asked = []
        for second in range(3600):
            steady(scaling, rate=10, since=second, until=second + 1)
            for n in range(100):
                scaling.window.first_token(second, within_slo=n < (50 if second < 300 else 92))
            if second % 15 == 14:
                asked.append(desired(scaling, second + 1, status(12)))
        assert asked[30] > 12
        assert asked[-1] == pytest.approx(asked[30], abs=0.01)

    def test_what_was_added_is_given_up_over_hours_and_at_once_without_traffic(self) -> None:
        scaling = Scaling(pool())
        for second in range(7200):
            steady(scaling, rate=10, since=second, until=second + 1)
            for n in range(10):
                scaling.window.first_token(second, within_slo=second >= 600 or n < 5)
            if second % 15 == 14:
                last = desired(scaling, second + 1, status(12))
            if second == 599:
                most = last
        assert most > 12
        assert 4.12 < last < 0.7 * most
        assert desired(scaling, 7300, status(12)) == 0.0


class Loop:
    """Desired replicas -> HPA -> instances that start late -> first tokens -> desired replicas.

    The HPA as Kubernetes has it: every 15 s, a tolerance of 0.1, the largest wish of the last 300 s. The fleet is one
    queue, first come, first served, which refuses who would wait for 30 s; each instance computes SPEED tokens a
    second, or ``true_speed`` of it.
    """

    def __init__(self, *, instances: int, start_s: float = 120.0, true_speed: float = 1.0, seed: int = 1) -> None:
        self._random = Random(seed)
        self._scaling = Scaling(pool())
        self._service_s = TOKENS / SPEED / true_speed
        self._start_s = start_s
        self._free_s = [0.0] * instances
        self._starting: list[float] = []
        self._wishes: deque[tuple[float, int]] = deque()
        self._finished: list[tuple[float, bool]] = []
        self._now = 0.0
        self.sizes: list[int] = []
        self.late: list[float] = []

    def run(self, *, rate: float, seconds: float) -> None:
        """Let Poisson arrivals come for so long."""
        end_s = self._now + seconds
        arrival_s = self._now + self._random.expovariate(rate)
        while self._now < end_s:
            self._now += 15.0
            while arrival_s < self._now:
                self._arrive(arrival_s)
                arrival_s += self._random.expovariate(rate)
            self._finish(self._now)
            self._scale()

    def _arrive(self, now: float) -> None:
        for ready_s in [each for each in self._starting if each <= now]:
            self._starting.remove(ready_s)
            heapq.heappush(self._free_s, ready_s)
        if self._free_s[0] - now > 30.0:
            self._scaling.window.refuse(now)
            self.late.append(now)
            return
        done_s = max(heapq.heappop(self._free_s), now) + self._service_s * self._random.uniform(0.5, 1.5)
        heapq.heappush(self._free_s, done_s)
        self._scaling.window.add(now, uncached_tokens=TOKENS, cached_tokens=0)
        heapq.heappush(self._finished, (done_s, done_s - now <= 5.0))

    def _finish(self, now: float) -> None:
        while self._finished and self._finished[0][0] <= now:
            done_s, met = heapq.heappop(self._finished)
            self._scaling.window.first_token(done_s, within_slo=met)
            if not met:
                self.late.append(done_s)

    def _scale(self) -> None:
        current, serving = len(self._free_s) + len(self._starting), len(self._free_s)
        pending = len(self._finished) * TOKENS // serving
        wish = self._scaling.signals(self._now, status(serving, pending=pending)).desired_replicas
        wanted = current if abs(wish / current - 1) <= 0.1 else max(1, ceil(wish))
        self._wishes.append((self._now, wanted))
        while self._wishes[0][0] < self._now - 300:
            self._wishes.popleft()
        size = wanted if wanted > current else min(current, max(each for _, each in self._wishes))
        self._starting += [self._now + self._start_s] * (size - current)
        for _ in range(current - size):
            self._free_s.remove(min(self._free_s))
        self.sizes.append(size)


def changes(sizes: Sequence[int]) -> int:
    return sum(one != other for one, other in pairwise(sizes))


class TestClosedLoop:
    @pytest.mark.parametrize("seed", [1, 2])
    def test_steady_load_keeps_a_constant_fleet_that_meets_the_slo(self, seed: int) -> None:
        loop = Loop(instances=8, seed=seed)
        loop.run(rate=20, seconds=1800)
        # 40 000 tokens/s need 8.2 instances at half their speed; chance makes it one more.
        assert set(loop.sizes) <= {8, 9}
        assert changes(loop.sizes) <= 2
        assert not loop.late

    def test_a_step_up_is_answered_within_the_window_and_hardly_overshoots(self) -> None:
        loop = Loop(instances=8)
        loop.run(rate=20, seconds=300)
        before = len(loop.sizes)
        loop.run(rate=50, seconds=1200)
        after = loop.sizes[before:]
        assert after[3] >= 0.85 * 20.6
        # Some more for what has piled up meanwhile, for as long as the HPA remembers it.
        assert max(after) <= 1.25 * 20.6
        assert changes(after[-40:]) == 0

    def test_a_step_down_is_followed_after_the_hpas_patience_without_undershoot(self) -> None:
        loop = Loop(instances=20)
        loop.run(rate=50, seconds=300)
        before = len(loop.sizes)
        loop.run(rate=20, seconds=900)
        after = loop.sizes[before:]
        assert min(after) >= 8
        assert after[-1] <= 10
        assert all(later <= earlier for earlier, later in pairwise(after))

    def test_instances_slower_than_their_prefills_say_are_made_up_for_without_oscillation(self) -> None:
        loop = Loop(instances=8, true_speed=0.3)
        loop.run(rate=20, seconds=2.5 * 3600)
        # 40 000 tokens/s at 3000 each keep 13.3 instances busy; the arrivals ask for 8.2.
        # Now and then one of them is taken away, until the SLO says which was one too many.
        later = loop.sizes[240:]
        assert min(later) >= 13
        assert max(later) <= 18
        assert changes(later) <= 12
        assert len([each for each in loop.late if each > 3600]) < 0.05 * 20 * 1.5 * 3600
