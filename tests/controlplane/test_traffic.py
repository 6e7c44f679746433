from dataclasses import asdict
from itertools import pairwise

import pytest

from dualmap_extproc.telemetry.counts import Traffic
from dualmap_operator.decide.observed import TrafficStatus
from dualmap_operator.decide.traffic import TrafficWindow

NOTHING = TrafficStatus()


def totals(
    requests: int = 0, *, slo_met: int | None = None, predicted: int = 0, measured: int = 0, late: int = 0
) -> dict[str, object]:
    """Return a router's traffic totals, with 100 prompt tokens and a first token for each request."""
    return dict(
        asdict(
            Traffic(
                requests=requests,
                first_tokens=requests - late,
                slo_met=requests - late if slo_met is None else slo_met,
                prompt_tokens=100 * requests,
                predicted_cached_tokens=predicted,
                measured_cached_tokens=measured,
            )
        )
    )


class Watched:
    """A traffic window with reports of the routers every ten seconds."""

    def __init__(self, published: TrafficStatus | None = None) -> None:
        self.window = TrafficWindow(published=published)
        self.now_s = 1000.0
        self.last: dict[str, dict[str, object]] = {}
        self.shown = self.window.shown(self.now_s)

    def look(self, **routers: dict[str, object]) -> TrafficStatus:
        self.now_s += 10
        self.last = routers
        for router, each in routers.items():
            self.window.add(self.now_s, router, each)
        self.shown = self.window.shown(self.now_s)
        return self.shown

    def wait(self, seconds: float) -> TrafficStatus:
        """Repeat the last reports every ten seconds for this time."""
        for _ in range(round(seconds / 10)):
            self.look(**self.last)
        return self.shown


class TestShares:
    def test_traffic_counts_increases_instead_of_totals(self) -> None:
        watched = Watched()
        watched.look(a=totals(1000, slo_met=0))
        watched.look(a=totals(1100, slo_met=97, predicted=6300))
        assert watched.wait(30) == TrafficStatus(slo_attainment="0.97", cache_hit_rate="0.63")

    def test_traffic_weights_routers_by_requests(self) -> None:
        watched = Watched()
        watched.look(a=totals(), b=totals(50, slo_met=50))
        watched.look(a=totals(30, slo_met=30), b=totals(60, slo_met=50))
        assert watched.wait(30).slo_attainment == "0.75"

    @pytest.mark.parametrize(("slo_met", "text"), [(0, "0.00"), (100, "1.00"), (50, "0.50"), (7, "0.07")])
    def test_traffic_shares_have_two_digits(self, slo_met: int, text: str) -> None:
        watched = Watched()
        watched.look(a=totals())
        watched.look(a=totals(100, slo_met=slo_met))
        assert watched.wait(30).slo_attainment == text

    def test_traffic_with_few_requests_has_no_shares(self) -> None:
        watched = Watched()
        watched.look(a=totals())
        watched.look(a=totals(4))
        assert watched.wait(60) == NOTHING
        watched.look(a=totals(5))
        assert watched.wait(30) == TrafficStatus(slo_attainment="1.00", cache_hit_rate="0.00")

    def test_traffic_of_unstreamed_responses_has_only_a_hit_rate(self) -> None:
        watched = Watched()
        watched.look(a=totals())
        watched.look(a=totals(100, late=100, predicted=5000))
        assert watched.wait(30) == TrafficStatus(cache_hit_rate="0.50")

    def test_traffic_without_prompts_has_no_hit_rate(self) -> None:
        watched = Watched()
        watched.look(a=totals())
        watched.look(a={**totals(100), "prompt_tokens": 0})
        assert watched.wait(30) == TrafficStatus(slo_attainment="1.00")


class TestHitRate:
    def test_hit_rate_measured_by_engines_replaces_predictions(self) -> None:
        watched = Watched()
        watched.look(a=totals(), b=totals())
        watched.look(a=totals(100, predicted=9000, measured=4000), b=totals(100, predicted=9000))
        assert watched.wait(30).cache_hit_rate == "0.20"

    def test_hit_rate_caps_estimates_of_short_prompts(self) -> None:
        watched = Watched()
        watched.look(a=totals())
        watched.look(a=totals(100, measured=10_500))
        assert watched.wait(30).cache_hit_rate == "1.00"


class TestRouters:
    def test_traffic_counts_restarted_router_from_zero(self) -> None:
        watched = Watched()
        watched.look(a=totals(1000))
        watched.look(a=totals(1010))
        watched.look(a=totals(10, slo_met=0))
        assert watched.wait(30).slo_attainment == "0.50"

    def test_traffic_keeps_counts_of_a_stopped_router(self) -> None:
        watched = Watched()
        watched.look(a=totals(), b=totals())
        watched.look(a=totals(10), b=totals(10, slo_met=0))
        watched.look(a=totals(10))
        assert watched.wait(30).slo_attainment == "0.50"

    def test_traffic_resets_router_absent_for_a_whole_window(self) -> None:
        watched = Watched()
        watched.look(a=totals(10), b=totals())
        watched.look(b=totals())
        watched.wait(310)
        watched.look(a=totals(100_010, slo_met=0), b=totals(10))
        assert watched.wait(30).slo_attainment == "1.00"

    @pytest.mark.parametrize(
        "unreadable",
        [{}, {"requests": 5}, {**totals(), "slo_met": "1"}, {**totals(), "requests": -1}, {"slo_met": None}],
    )
    def test_traffic_skips_an_unreadable_report(self, unreadable: dict[str, object]) -> None:
        watched = Watched()
        watched.look(a=totals(1000, slo_met=0))
        watched.look(a=unreadable)
        watched.look(a=totals(1010, slo_met=10))
        assert watched.wait(30).slo_attainment == "1.00"


class TestTime:
    def test_traffic_drops_observations_older_than_the_window(self) -> None:
        watched = Watched()
        watched.look(a=totals())
        watched.look(a=totals(100, slo_met=0))
        assert watched.wait(150).slo_attainment == "0.00"
        watched.look(a=totals(200, slo_met=100))
        assert watched.wait(60).slo_attainment == "0.50"
        assert watched.wait(120).slo_attainment == "1.00"
        assert watched.wait(240) == NOTHING

    def test_traffic_status_changes_at_most_every_30_s(self) -> None:
        watched = Watched()
        watched.look(a=totals())
        changes: list[float] = []
        for n in range(1, 40):
            before = watched.shown
            if watched.look(a=totals(10 * n, slo_met=n * n // 5)) != before:
                changes.append(watched.now_s)
        assert len(changes) > 5
        assert all(later - earlier >= 30 for earlier, later in pairwise(changes))

    def test_traffic_combines_observations_close_in_time(self) -> None:
        window = TrafficWindow()
        window.shown(0.0)
        for n in range(1001):
            window.add(n / 5, "a", totals(n, slo_met=n // 4))
        assert window.shown(200.0).slo_attainment == "0.25"


class TestPreviousOperatorStatus:
    PUBLISHED = TrafficStatus(slo_attainment="0.97", cache_hit_rate="0.63")

    def test_previous_operator_status_is_kept_until_first_observation(self) -> None:
        watched = Watched(self.PUBLISHED)
        watched.look(a=totals(1000))
        assert watched.wait(280) == self.PUBLISHED
        assert watched.wait(30) == NOTHING

    def test_previous_operator_status_is_replaced_by_own_observations(self) -> None:
        watched = Watched(self.PUBLISHED)
        watched.look(a=totals(1000))
        assert watched.look(a=totals(1100, slo_met=1100, predicted=0)) == self.PUBLISHED
        assert watched.wait(30) == TrafficStatus(slo_attainment="1.00", cache_hit_rate="0.00")


def test_traffic_counts_rejected_requests_as_slo_misses() -> None:
    watched = Watched()
    watched.look(a=totals())
    shown = [watched.look(a={**totals(30), "refused": 10}) for _ in range(6)]
    assert shown[-1].slo_attainment == "0.75"
