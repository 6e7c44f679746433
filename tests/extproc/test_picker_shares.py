"""Shares of a pool's members at the router's picker: equal engines, an engine that was slow, and a new engine.

Requests are whole bodies, as Envoy sends them. The engines have a simulated clock, and serve one prefill after the
other. ``tests/core/test_equal_shares.py`` has more rates and prompts, and several routers.
"""

import heapq
import random
from collections import Counter
from dataclasses import replace
from itertools import count

import pytest

from dualmap.pools.pool import Member
from dualmap.requests import Usage
from dualmap_extproc.request.picked import Picked
from extproc.desks import Desk
from extproc.envoy_messages import chat, pool

TOKENS = 1000
TEXT_BYTES = 4 * TOKENS
SPEED = 14_000.0
"""The engines' speed in tokens per second, twice the speed that the router expects at first."""
OVERHEAD_S = 0.02
DECODE_S = 0.5
LIGHT = 10.0
"""Light traffic, in requests per second."""
HEAVY = 0.8 * 4 / (OVERHEAD_S + TOKENS / SPEED)
"""Four fifths of what four engines serve."""


class Traffic:
    """New prompts through a router's picker, to engines whose prefill times have 5 % noise.

    Without streaming, the access log reports the usage up to a second after the answer.
    """

    def __init__(self, *, streamed: bool = True) -> None:
        self.pool = pool()
        self._streamed = streamed
        self.slowness: dict[str, float] = {}
        self._desk = Desk(self.pool)
        self._random = random.Random(1)
        self._now = 10.0
        self._free_s = Counter[str]()
        self._events: list[tuple[float, str, str]] = []
        self.answered = Counter[str]()
        """The first bytes of answers so far, by member."""
        self._prompts = count()
        self._chosen = Counter[str]()

    def send(self) -> None:
        """Send a new prompt now."""
        text = f"{next(self._prompts)} ".ljust(TEXT_BYTES, "x")
        picked = self._desk.ask(chat(text, stream=self._streamed), now=self._now)
        if isinstance(picked, Picked):
            self._begin(picked)

    def _begin(self, picked: Picked) -> None:
        """Send a request to the engine that the router picked."""
        assert picked.decision is not None
        member = picked.decision.receipt.chosen
        self._chosen[member] += 1
        noise = self._random.uniform(0.95, 1.05)
        service_s = (OVERHEAD_S + TOKENS / SPEED) * self.slowness.get(member, 1.0) * noise
        first_s = self._free_s[member] = max(self._now, self._free_s[member]) + service_s
        ends_s = first_s + DECODE_S
        logged_s = ends_s if self._streamed else ends_s + self._random.random()
        heapq.heappush(self._events, (first_s if self._streamed else ends_s, picked.request_id, member))
        heapq.heappush(self._events, (logged_s, picked.request_id, ""))

    def one_by_one(self, number: int) -> dict[str, float]:
        """Send each prompt after the end of the one before; return each member's share as a multiple of the mean."""
        for _ in range(number):
            self.send()
            self._advance(max(at_s for at_s, *_ in self._events))
        return self._shares()

    def poisson(self, rate: float, seconds: float) -> dict[str, float]:
        """Send prompts at random times; return each member's share as a multiple of the mean."""
        ends_s = self._now + seconds
        while (at_s := self._now + self._random.expovariate(rate)) < ends_s:
            self._advance(at_s)
            self.send()
        self._advance(ends_s)
        return self._shares()

    def add_member(self) -> str:
        added = Member(id="qwen-new", address="10.0.0.9", port=8000)
        self.pool = replace(self.pool, members=(*self.pool.members, added), ring_version=2)
        self._desk.picker.set_pools(self._now, (self.pool,))
        return added.id

    def _shares(self) -> dict[str, float]:
        chosen, self._chosen = self._chosen, Counter()
        ids = [each.id for each in self.pool.members]
        return {each: chosen[each] * len(ids) / chosen.total() for each in ids}

    def _advance(self, to_s: float) -> None:
        while self._events and self._events[0][0] <= to_s:
            at_s, request_id, first_of = heapq.heappop(self._events)
            if first_of:
                self.answered[first_of] += 1
            if first_of and self._streamed:
                self._desk.picker.first_token(at_s, request_id)
            elif first_of:
                self._desk.picker.finished(at_s, request_id, None)
            else:
                self._desk.picker.finished(at_s, request_id, Usage(completion_tokens=100))
            self._now = at_s
            while self._desk.resumed:
                queued = self._desk.resumed.pop(0)
                assert isinstance(queued, Picked)
                self._begin(queued)
        self._now = to_s


@pytest.mark.parametrize("streamed", [True, False])
def test_equal_members_share_prompts_that_come_one_by_one(streamed: bool) -> None:
    shares = Traffic(streamed=streamed).one_by_one(200)
    assert 0.4 < min(shares.values()) <= max(shares.values()) < 1.8


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("rate", [0.25, LIGHT, HEAVY])
def test_equal_members_share_prompts_at_any_load(rate: float, streamed: bool) -> None:
    shares = Traffic(streamed=streamed).poisson(rate, 500 / rate)
    assert 0.4 < min(shares.values()) <= max(shares.values()) < 1.8


@pytest.mark.parametrize("streamed", [True, False])
def test_member_that_was_slow_gets_its_share_again_within_a_minute(streamed: bool) -> None:
    traffic = Traffic(streamed=streamed)
    traffic.poisson(LIGHT, 60)
    traffic.slowness["qwen-0"] = 4.0
    assert traffic.poisson(LIGHT, 60)["qwen-0"] < 0.6
    assert traffic.poisson(LIGHT, 60)["qwen-0"] < 0.6
    traffic.slowness.clear()
    traffic.poisson(LIGHT, 60)
    assert traffic.poisson(LIGHT, 60)["qwen-0"] > 0.4


@pytest.mark.parametrize("streamed", [True, False])
def test_new_member_with_three_slow_first_answers_gets_its_share_within_a_minute(streamed: bool) -> None:
    traffic = Traffic(streamed=streamed)
    traffic.poisson(LIGHT, 60)
    new = traffic.add_member()
    traffic.slowness[new] = 10.0
    while traffic.answered[new] < 3:
        traffic.poisson(LIGHT, 0.5)
    traffic.slowness.clear()
    traffic.poisson(LIGHT, 60)
    assert traffic.poisson(LIGHT, 60)[new] > 0.4
