"""Tests of the comparison of a recording's windows of time with those of its simulation."""

import pytest

from dualmap_cli.simulate.comparison import Figure, WindowShare, WindowShares, window_shares
from dualmap_cli.simulate.values import window_text


def share(measured: float, simulated: float, *, requests: int, start_s: float = 0.0) -> WindowShare:
    return WindowShare(
        start_s=start_s, requests=requests, slo_attainment=Figure(measured=measured, simulated=simulated)
    )


def test_window_differs_beyond_ten_points_and_beyond_chance() -> None:
    assert share(1.0, 0.88, requests=1000).differs
    assert not share(1.0, 0.91, requests=1000).differs
    # Chance separates the shares of 20 requests by 32 points if half of them are within the SLO.
    assert not share(0.65, 0.35, requests=20).differs
    assert share(0.70, 0.30, requests=20).differs


def test_one_of_ten_windows_may_differ() -> None:
    alike = tuple(share(1.0, 1.0, requests=100) for _ in range(9))
    once = WindowShares(window_s=60.0, shares=(*alike, share(1.0, 0.5, requests=100, start_s=600.0)))
    assert list(once.reasons()) == []
    twice = WindowShares(window_s=60.0, shares=(*once.shares, share(0.2, 1.0, requests=100, start_s=660.0)))
    assert list(twice.reasons()) == [
        "the share within the SLO differs in 2 of 11 windows (1 min), most from 660 s on: 100.0% simulated and "
        "20.0% measured"
    ]


@pytest.mark.parametrize(
    ("requests", "every_s", "window_s", "windows"),
    [
        (79, 1.0, 78.0, 0),
        (80, 1.0, 60.0, 2),
        (2400, 1.0, 120.0, 20),
        (10_000, 1.0, 600.0, 17),
        (100_000, 10.0, 43_200.0, 24),
        (400_000, 10.0, 172_800.0, 24),
        (1000, 0.0, 0.0, 0),
    ],
)
def test_windows_have_a_usual_length_and_enough_requests(
    requests: int, every_s: float, window_s: float, windows: int
) -> None:
    arrivals_s = [number * every_s for number in range(requests)]
    within = [True] * requests
    found = window_shares(arrivals_s, within, within)
    assert (found.window_s, len(found.shares)) == (window_s, windows)


def test_windows_without_requests_do_not_exist() -> None:
    assert window_shares([], [], []).shares == ()


def test_window_text_names_lengths_for_people() -> None:
    lengths = {1.0: "1 s", 90.0: "90 s", 600.0: "10 min", 3600.0: "hour", 7200.0: "2 h", 86_400.0: "day"}
    assert {length: window_text(length) for length in lengths} == lengths
    assert window_text(172_800.0) == "2 days"
