"""Tests of desired replicas in a closed loop with an HPA and a simple queue."""

import heapq
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from math import ceil
from random import Random

import pytest

from core.scalings import SPEED, TOKENS, pool, status
from dualmap.scaling.scaling import Scaling


class Loop:
    """A closed loop: desired replicas, HPA, instances with a cold start, first tokens, desired replicas.

    The HPA is like Kubernetes': it acts every 15 s with a tolerance of 0.1, on the largest value of the last 300 s. The
    fleet is one queue in arrival order, which rejects a request after a wait of 30 s. Each instance computes SPEED
    tokens per second, times ``true_speed``.
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
        """Send Poisson arrivals for this number of seconds."""
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
            self._scaling.window.reject(now)
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
    def test_steady_load_keeps_the_fleet_size_and_meets_the_slo(self, seed: int) -> None:
        loop = Loop(instances=8, seed=seed)
        loop.run(rate=20, seconds=1800)
        # 40 000 tokens/s need 8.2 instances at half their speed; random variation adds one instance.
        assert set(loop.sizes) <= {8, 9}
        assert changes(loop.sizes) <= 2
        assert not loop.late

    def test_fleet_follows_load_increase_in_a_window_without_overshoot(self) -> None:
        loop = Loop(instances=8)
        loop.run(rate=20, seconds=300)
        before = len(loop.sizes)
        loop.run(rate=50, seconds=1200)
        after = loop.sizes[before:]
        assert after[3] >= 0.85 * 20.6
        # The backlog temporarily adds some instances, for the HPA's stabilization window.
        assert max(after) <= 1.25 * 20.6
        assert changes(after[-40:]) == 0

    def test_fleet_follows_load_decrease_after_stabilization(self) -> None:
        loop = Loop(instances=20)
        loop.run(rate=50, seconds=300)
        before = len(loop.sizes)
        loop.run(rate=20, seconds=900)
        after = loop.sizes[before:]
        assert min(after) >= 8
        assert after[-1] <= 10
        assert all(later <= earlier for earlier, later in pairwise(after))

    def test_fleet_compensates_slow_members_with_few_size_changes(self) -> None:
        loop = Loop(instances=8, true_speed=0.3)
        loop.run(rate=20, seconds=2.5 * 3600)
        # 40 000 tokens/s at 3000 tokens/s per instance need 13.3 instances, but the estimate from arrivals is 8.2. From
        # time to time the rule removes an instance, and adds it again after SLO misses.
        later = loop.sizes[240:]
        assert min(later) >= 13
        assert max(later) <= 18
        assert changes(later) <= 12
        assert len([each for each in loop.late if each > 3600]) < 0.05 * 20 * 1.5 * 3600
