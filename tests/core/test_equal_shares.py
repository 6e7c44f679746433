"""Shares of a pool's members at light and heavy traffic: equal engines, slow engines, and a new engine."""

import pytest

from core.traffic import HIGH_LOAD, Traffic, capacity


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
