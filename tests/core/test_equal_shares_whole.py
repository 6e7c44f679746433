"""Shares of a pool's members if answers are not streamed, so that the router knows only their durations."""

import pytest

from core.traffic import HIGH_LOAD, Traffic, capacity

VARIED = (20, 500)


@pytest.mark.parametrize(("tokens", "rate"), [(200, 0.25), (200, 10.0), (1000, 0.25), (1000, 10.0), (8000, 1.0)])
def test_equal_members_share_whole_answers_at_any_rate(tokens: int, rate: float) -> None:
    shares = Traffic(streamed=False, output_tokens=VARIED).poisson(rate, 300 / rate, tokens=tokens)
    assert 0.4 < min(shares.values()) <= max(shares.values()) < 1.8


@pytest.mark.parametrize("tokens", [200, 1000, 8000])
def test_equal_members_share_whole_answers_at_high_load(tokens: int) -> None:
    rate = capacity(tokens, HIGH_LOAD)
    shares = Traffic(streamed=False, output_tokens=VARIED).poisson(rate, 600 / rate, tokens=tokens)
    assert 0.4 < min(shares.values()) <= max(shares.values()) < 1.8


@pytest.mark.parametrize("tokens", [1000, 8000])
@pytest.mark.parametrize("load", [0.2, HIGH_LOAD])
def test_equal_members_share_whole_answers_to_warm_prompts(tokens: int, load: float) -> None:
    rate = capacity(tokens, load)
    traffic = Traffic(streamed=False, output_tokens=VARIED)
    shares = traffic.poisson(rate, 1000 / rate, tokens=tokens, prompts=200)
    assert 0.4 < min(shares.values()) <= max(shares.values()) < 1.8


@pytest.mark.parametrize("decodes_slower", [False, True])
@pytest.mark.parametrize(
    ("tokens", "rate", "routers", "owner"),
    [
        (200, 10.0, 1, False),
        (1000, 10.0, 1, False),
        (200, 1.0, 1, False),
        (1000, 1.0, 1, False),
        (8000, 1.0, 1, False),
        (1000, 10.0, 2, False),
        (1000, 10.0, 4, False),
        (1000, 10.0, 4, True),
    ],
)
def test_slow_member_gets_fewer_whole_answers_and_returns(
    tokens: int, rate: float, routers: int, owner: bool, decodes_slower: bool
) -> None:
    """The member gets fewer after 40 requests. It is back after a minute, or after 150 requests at 1 request/s."""
    traffic = Traffic(routers, owner=owner, streamed=False, decodes_slower=decodes_slower)
    traffic.poisson(rate, 60, tokens=tokens)
    traffic.slowness["m-0"] = 4.0
    traffic.poisson(rate, 40 / rate, tokens=tokens)
    assert traffic.poisson(rate, 60, tokens=tokens)["m-0"] < 0.6
    assert traffic.poisson(rate, 120, tokens=tokens)["m-0"] < 0.6
    traffic.slowness.clear()
    traffic.poisson(rate, max(60, 150 / rate), tokens=tokens)
    assert traffic.poisson(rate, 60, tokens=tokens)["m-0"] > 0.4


@pytest.mark.parametrize("decodes_slower", [False, True])
@pytest.mark.parametrize("tokens", [200, 1000, 8000])
@pytest.mark.parametrize("seed", range(4))
def test_slow_member_gets_fewer_whole_answers_in_the_first_minute_at_one_request_a_second(
    seed: int, tokens: int, decodes_slower: bool
) -> None:
    traffic = Traffic(streamed=False, decodes_slower=decodes_slower, seed=seed)
    traffic.poisson(1.0, 60, tokens=tokens)
    traffic.slowness["m-0"] = 4.0
    assert traffic.poisson(1.0, 60, tokens=tokens)["m-0"] < 0.6


def test_slow_member_gets_few_long_whole_answers_while_one_is_awaited() -> None:
    """An answer takes 10 s, or 40 s at the slow member, where one request at a time tests the member."""
    traffic = Traffic(streamed=False, decode_s=10.0, decodes_slower=True)
    traffic.poisson(10.0, 60, tokens=1000)
    traffic.slowness["m-0"] = 4.0
    traffic.poisson(10.0, 60, tokens=1000)
    assert traffic.poisson(10.0, 180, tokens=1000)["m-0"] < 0.2


@pytest.mark.parametrize("routers", [1, 2, 4])
def test_new_member_with_slow_first_whole_answers_gets_its_share_within_a_minute(routers: int) -> None:
    traffic = Traffic(routers, streamed=False)
    traffic.poisson(10.0, 60, tokens=1000)
    new = traffic.add_member()
    traffic.slowness[new] = 10.0
    traffic.poisson(10.0, 2, tokens=1000)
    traffic.slowness.clear()
    traffic.poisson(10.0, 58, tokens=1000)
    assert traffic.poisson(10.0, 60, tokens=1000)[new] > 0.4
