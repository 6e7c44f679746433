"""Tests of desired replicas for attainment: members are added for SLO misses, and removed later."""

from collections.abc import Sequence

import pytest

from core.scalings import desired, pool, status, steady
from dualmap.scaling.scaling import WINDOW_S, FirstTokens, OtherRouter, Scaling


def said(desired_replicas: float, *, count: int, slo_met: int) -> OtherRouter:
    first_tokens = FirstTokens(count=count, slo_met=slo_met)
    return OtherRouter(desired_replicas=desired_replicas, first_tokens=first_tokens)


class TestAttainment:
    def asked(
        self,
        *,
        share_met: float,
        members: int,
        rate: float = 10,
        peers: int = 0,
        first_tokens: int = 10,
        others: Sequence[OtherRouter] = (),
    ) -> list[float]:
        """Return the desired replicas every 15 s for ten minutes, with this share of first tokens within the SLO."""
        scaling = Scaling(pool())
        asked = []
        for second in range(600):
            steady(scaling, rate=rate, since=second, until=second + 1)
            for n in range(first_tokens):
                scaling.window.first_token(second, within_slo=n < share_met * first_tokens)
            if second % 15 == 14:
                state = status(members, peers=peers)
                asked.append(scaling.signals(second + 1, state, others=others).desired_replicas)
        return asked

    def test_attainment_is_the_share_of_first_tokens_within_slo(self) -> None:
        scaling = Scaling(pool())
        assert scaling.signals(0, status()).slo_attainment is None
        for n in range(10):
            scaling.window.first_token(100 + n, within_slo=n < 7)
        assert scaling.signals(110, status()).slo_attainment == 0.7
        assert scaling.signals(110 + WINDOW_S, status()).slo_attainment is None

    def test_met_slo_attainment_adds_no_members(self) -> None:
        asked = self.asked(share_met=1.0, members=5)
        assert asked[-1] == pytest.approx(4.12, rel=0.01)

    def test_missed_slo_attainment_at_desired_size_adds_members(self) -> None:
        asked = self.asked(share_met=0.5, members=5)
        assert asked[3] == pytest.approx(4.12, rel=0.01)  # No addition in the window after an addition.
        assert 5.5 < asked[-1] < 7

    def test_missed_slo_attainment_above_desired_size_adds_members(self) -> None:
        assert self.asked(share_met=0.5, members=12)[4] > 12

    def test_missed_slo_attainment_during_scale_up_adds_no_members(self) -> None:
        assert self.asked(share_met=0.5, members=3)[-1] == pytest.approx(4.12, rel=0.01)

    def test_missed_slo_attainment_is_shared_between_routers(self) -> None:
        alone = self.asked(share_met=0.5, members=12)
        # The last share of this router is more than half of its first share, because the other router's report is
        # unchanged.
        other = said(6.0, count=550, slo_met=275)
        share = self.asked(share_met=0.5, members=12, rate=5, peers=1, others=(other,))
        assert 2 * share[4] == pytest.approx(alone[4], rel=0.02)

    def test_router_with_all_traffic_adds_all_missing_members(self) -> None:
        """The other routers have no traffic, because an Envoy keeps its connection to one router."""
        assert self.asked(share_met=0.5, members=12, peers=3) == self.asked(share_met=0.5, members=12)

    def test_attainment_uses_first_tokens_of_all_routers(self) -> None:
        """Each of twenty routers has only four first tokens per minute, but half of the pool's are late."""
        scaling, missed = Scaling(pool()), [said(0.6, count=4, slo_met=2)] * 19
        for second in range(0, 300, 15):
            steady(scaling, rate=0.5, since=second, until=second + 15)
            scaling.window.first_token(second + 15, within_slo=True)
            state = status(12, peers=19)
            last = scaling.signals(second + 15, state, others=missed).desired_replicas
        assert 20 * last > 12

    def test_late_router_in_a_pool_that_meets_its_slo_adds_no_members(self) -> None:
        scaling, met = Scaling(pool()), (said(4.0, count=900, slo_met=895),)
        for second in range(300):
            steady(scaling, rate=10, since=second, until=second + 1)
            scaling.window.first_token(second, within_slo=second % 5 != 0)
            if second % 15 == 14:
                last = scaling.signals(second + 1, status(8, peers=1), others=met).desired_replicas
        assert last == pytest.approx(4.12, rel=0.01)

    def test_few_first_tokens_add_no_members(self) -> None:
        scaling = Scaling(pool())
        for second in range(0, 300, 15):
            steady(scaling, rate=10, since=second, until=second + 15)
            scaling.window.first_token(second + 15, within_slo=False)
            last = desired(scaling, second + 15, status(5))
        assert last == pytest.approx(4.12, rel=0.01)

    def test_added_members_stay_while_the_slo_is_barely_met(self) -> None:
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

    def test_added_members_decrease_over_hours_or_without_traffic(self) -> None:
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
