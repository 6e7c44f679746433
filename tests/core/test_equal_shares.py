"""Shares of a pool's members at light and heavy traffic: equal engines, slow engines, and a new engine."""

import heapq
import random
from collections import Counter
from dataclasses import replace
from itertools import count

import pytest

from builders import members, pool, request, text_of
from core.shared_routers import Routers
from dualmap.requests import Asked, Decision, Request, Usage
from dualmap.router import PoolRouter
from dualmap.shared_router import Router

SPEED = 14_000.0
"""The engines' speed in tokens per second, twice the speed that the pool's specification expects."""
OVERHEAD_S = 0.02
HIGH_LOAD = 0.8


def capacity(tokens: int, share: float) -> float:
    """Return a share of the requests per second that four engines serve."""
    return share * 4 / (OVERHEAD_S + tokens / SPEED)


class Traffic:
    """Prompts through routers, to engines that serve one prefill after the other with 5 % noise.

    Each request goes to a random router. No router has news from another, unless ``owner`` is true: then the pool's
    owner decides, and messages arrive at once.
    """

    def __init__(self, routers: int = 1, *, owner: bool = False) -> None:
        self._shared = Routers(pool(4), routers) if owner else None
        self.routers: list[Router] = [PoolRouter(pool(4)) for _ in range(routers)]
        if self._shared is not None:
            self.routers = list(self._shared.routers.values())
        self.slowness: dict[str, float] = {}
        self._random = random.Random(1)
        self._now = 0.0
        self._free_s = Counter[str]()
        self._events: list[tuple[float, str, bool, Router]] = []
        self._ids = count()
        self._chosen = Counter[str]()
        self._cached: set[tuple[str, str]] = set()

    def send(self, tokens: int, *, prompts: int | None = None) -> float:
        """Send a prompt now, a new one or one of ``prompts``; return the time of its first token."""
        name, router = f"{next(self._ids)}", self._random.choice(self.routers)
        prompt = name if prompts is None else f"prompt {self._random.randrange(prompts)}"
        decision = self._decision(router, request(name, text_of(tokens, prompt), now=self._now))
        member = decision.receipt.chosen
        self._chosen[member] += 1
        new_tokens = 0 if (member, prompt) in self._cached else tokens
        self._cached.add((member, prompt))
        service_s = (
            (OVERHEAD_S + new_tokens / SPEED) * self.slowness.get(member, 1.0) * self._random.uniform(0.95, 1.05)
        )
        ends_s = self._free_s[member] = max(self._now, self._free_s[member]) + service_s
        heapq.heappush(self._events, (ends_s, name, True, router))
        heapq.heappush(self._events, (ends_s + 0.5, name, False, router))
        return ends_s

    def _decision(self, router: Router, asked: Request) -> Decision:
        answer = router.on_request(self._now, asked).answer
        if self._shared is not None and isinstance(answer, Asked):
            self._shared.now = self._now
            self._shared.deliver()
            return self._shared.decision(asked.id)
        assert isinstance(answer, Decision)
        return answer

    def poisson(self, rate: float, seconds: float, *, tokens: int, prompts: int | None = None) -> dict[str, float]:
        """Send prompts at random times; return each member's share as a multiple of the mean."""
        ends_s = self._now + seconds
        while (at_s := self._now + self._random.expovariate(rate)) < ends_s:
            self.advance(at_s)
            self.send(tokens, prompts=prompts)
        self.advance(ends_s)
        return self.shares()

    def one_by_one(self, number: int, *, tokens: int) -> dict[str, float]:
        """Send each prompt after the end of the one before; return the shares."""
        for _ in range(number):
            self.advance(self.send(tokens) + 0.6)
        return self.shares()

    def shares(self) -> dict[str, float]:
        chosen, self._chosen = self._chosen, Counter()
        ids = [each.id for each in self.routers[0].status().endpoints]
        return {each: chosen[each] * len(ids) / chosen.total() for each in ids}

    def advance(self, to_s: float) -> None:
        while self._events and self._events[0][0] <= to_s:
            at_s, name, is_first, router = heapq.heappop(self._events)
            if is_first:
                router.on_first_token(at_s, name)
            else:
                router.on_finished(at_s, name, Usage(completion_tokens=100))
            if self._shared is not None:
                self._shared.now = at_s
                self._shared.deliver()
        self._now = to_s

    def add_member(self) -> str:
        added = members(5)[-1]
        for router in self.routers:
            router.on_pool(self._now, replace(router.pool, members=members(5)))
        return added.id


@pytest.mark.parametrize("tokens", [200, 1000, 8000])
def test_equal_members_share_cold_prompts_one_by_one(tokens: int) -> None:
    shares = Traffic().one_by_one(200, tokens=tokens)
    assert 0.4 < min(shares.values()) <= max(shares.values()) < 1.8


@pytest.mark.parametrize(("tokens", "rate"), [(200, 0.25), (200, 10.0), (1000, 0.25), (1000, 10.0), (8000, 1.0)])
def test_equal_members_share_cold_prompts_at_any_rate(tokens: int, rate: float) -> None:
    shares = Traffic().poisson(rate, 300 / rate, tokens=tokens)
    assert 0.4 < min(shares.values()) <= max(shares.values()) < 1.8


@pytest.mark.parametrize("tokens", [200, 1000, 8000])
def test_equal_members_share_cold_prompts_at_high_load(tokens: int) -> None:
    rate = capacity(tokens, HIGH_LOAD)
    shares = Traffic().poisson(rate, 600 / rate, tokens=tokens)
    assert 0.4 < min(shares.values()) <= max(shares.values()) < 1.8


@pytest.mark.parametrize("tokens", [1000, 8000])
@pytest.mark.parametrize("load", [0.2, HIGH_LOAD])
def test_equal_members_share_warm_prompts(tokens: int, load: float) -> None:
    """Each of 200 prompts comes 5 times. The rate is a part of the capacity for cold prompts."""
    rate = capacity(tokens, load)
    shares = Traffic().poisson(rate, 1000 / rate, tokens=tokens, prompts=200)
    assert 0.4 < min(shares.values()) <= max(shares.values()) < 1.8


@pytest.mark.parametrize("owner", [False, True])
@pytest.mark.parametrize("routers", [2, 4])
def test_equal_members_share_cold_prompts_of_several_routers(routers: int, owner: bool) -> None:
    shares = Traffic(routers, owner=owner).poisson(10.0, 60, tokens=1000)
    assert 0.4 < min(shares.values()) <= max(shares.values()) < 1.8


@pytest.mark.parametrize(
    ("tokens", "rate", "routers"), [(200, 10.0, 1), (1000, 10.0, 1), (8000, 1.0, 1), (1000, 10.0, 2), (1000, 10.0, 4)]
)
def test_slow_member_gets_less_and_returns_after_some_requests(tokens: int, rate: float, routers: int) -> None:
    """The member is back after a minute at 10 requests/s, or after 150 requests at 1 request/s."""
    traffic = Traffic(routers)
    traffic.poisson(rate, 60, tokens=tokens)
    traffic.slowness["m-0"] = 4.0
    assert traffic.poisson(rate, 60, tokens=tokens)["m-0"] < 0.6
    assert traffic.poisson(rate, 120, tokens=tokens)["m-0"] < 0.6
    traffic.slowness.clear()
    traffic.poisson(rate, max(60, 150 / rate), tokens=tokens)
    assert traffic.poisson(rate, 60, tokens=tokens)["m-0"] > 0.4


@pytest.mark.parametrize("routers", [1, 2, 4])
def test_new_member_with_slow_first_answers_gets_its_share_within_a_minute(routers: int) -> None:
    traffic = Traffic(routers)
    traffic.poisson(10.0, 60, tokens=1000)
    new = traffic.add_member()
    traffic.slowness[new] = 10.0
    traffic.poisson(10.0, 2, tokens=1000)
    traffic.slowness.clear()
    traffic.poisson(10.0, 58, tokens=1000)
    assert traffic.poisson(10.0, 60, tokens=1000)[new] > 0.4
