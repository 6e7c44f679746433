"""Tests of a member's estimated speed without interference, at one of several routers."""

from itertools import count

import pytest

import builders
from core.routers import decide
from dualmap.pools.pool import Engine
from dualmap.replicas.update import HotnessCounts, ReplicaUpdate, SharedLoad
from dualmap.requests import EndpointStatus
from dualmap.router import PoolRouter

SPEED = 5000.0
TOKENS = 2000
POOL = builders.pool(1, engine=Engine(prefill_tokens_per_second=SPEED))
MEMBER = POOL.members[0].id
BUSY = SharedLoad(pending_prefill_tokens=TOKENS, backlog_s=0.4, in_flight=1)


def say(router: PoolRouter, now: float, load: SharedLoad | None, *, age_s: float = 0.05) -> None:
    loads = {} if load is None else {MEMBER: load}
    router.on_update(now, "other", ReplicaUpdate(hotness=HotnessCounts(requests=0, nodes={}), loads=loads), age_s)


class Prefills:
    """Runs a router's prefills one after the other, each on an idle instance."""

    def __init__(self) -> None:
        self.router = PoolRouter(POOL)
        self.now = 0.0
        self._ids = count()

    def run(self, seconds: float, *, other_from_s: float | None = None, other: SharedLoad = BUSY) -> None:
        """Run a prefill of this duration.

        The router receives another router's load ``other_from_s`` after the request, and its end shortly before the
        prefill's end.
        """
        name = str(next(self._ids))
        decide(self.router, name, builders.text_of(TOKENS, name), self.now)
        if other_from_s is not None:
            say(self.router, self.now + other_from_s, other)
            say(self.router, self.now + seconds - 0.01, None, age_s=0.01)
        self.now += seconds
        self.router.on_first_token(self.now, name)
        self.router.on_finished(self.now, name)
        self.now += 1.0

    @property
    def endpoint(self) -> EndpointStatus:
        (endpoint,) = self.router.status().endpoints
        return endpoint


def test_solo_speed_of_single_router_equals_the_measured_speed() -> None:
    prefills = Prefills()
    for _ in range(30):
        prefills.run(0.8)
    assert prefills.endpoint.prefill_tokens_per_second < 0.6 * SPEED
    assert prefills.endpoint.solo_tokens_per_second == prefills.endpoint.prefill_tokens_per_second


def test_solo_speed_excludes_unreported_prefills_of_other_routers() -> None:
    prefills = Prefills()
    for _ in range(30):
        prefills.run(0.4)
        prefills.run(0.8, other_from_s=0.1)
    assert prefills.endpoint.prefill_tokens_per_second < 0.85 * SPEED
    assert prefills.endpoint.solo_tokens_per_second == pytest.approx(SPEED, rel=0.05)


def test_solo_speed_ignores_prefills_that_have_ended() -> None:
    prefills = Prefills()
    for _ in range(30):
        say(prefills.router, prefills.now - 0.5, BUSY)
        say(prefills.router, prefills.now - 0.2, None)
        prefills.run(0.8)
    assert prefills.endpoint.solo_tokens_per_second < 0.6 * SPEED


def test_solo_speed_ignores_queued_requests_of_other_routers() -> None:
    """In overload, every router always has queued requests."""
    prefills, holds = Prefills(), SharedLoad(pending_prefill_tokens=TOKENS, held_s=0.4)
    for _ in range(30):
        prefills.run(0.4, other_from_s=0.1, other=holds)
        prefills.run(0.8, other_from_s=0.1)
    assert prefills.endpoint.prefill_tokens_per_second < 0.85 * SPEED
    assert prefills.endpoint.solo_tokens_per_second == pytest.approx(SPEED, rel=0.05)


def test_solo_speed_corrects_a_wrong_prior_under_interference() -> None:
    prefills = Prefills()
    for _ in range(30):
        prefills.run(1.2, other_from_s=0.1)
    ordinary = prefills.endpoint.prefill_tokens_per_second
    assert ordinary < 0.5 * SPEED
    assert prefills.endpoint.solo_tokens_per_second == ordinary


def test_solo_speed_reduces_the_weight_of_old_samples() -> None:
    prefills = Prefills()
    for _ in range(30):
        prefills.run(0.4)
    for _ in range(200):
        prefills.run(1.2, other_from_s=0.1)
    assert prefills.endpoint.solo_tokens_per_second < 1.2 * prefills.endpoint.prefill_tokens_per_second


def test_solo_speed_restarts_learning_after_a_changed_prior() -> None:
    prefills = Prefills()
    for _ in range(30):
        prefills.run(0.8)
    guess = builders.pool(1, engine=Engine(prefill_tokens_per_second=2 * SPEED))
    prefills.router.on_pool(prefills.now, guess)
    assert prefills.endpoint.solo_tokens_per_second == pytest.approx(2 * SPEED)
