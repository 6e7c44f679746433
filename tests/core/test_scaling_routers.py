"""Tests of desired replicas with several routers: the total of the members that the routers add for SLO misses."""

from collections.abc import Sequence

import pytest

from core.scalings import SPEED, TOKENS, pool, status
from dualmap.scaling.scaling import WINDOW_S, OtherRouter, Scaling

RATE = 10
ASKED_S = 5


class Routers:
    """Routers that share a pool's traffic and receive each other's last desired replicas."""

    def __init__(self, number: int, *, tokens: Sequence[int] = ()) -> None:
        self.scalings = [Scaling(pool()) for _ in range(number)]
        self.wishes = [0.0] * number
        self._tokens = tokens or (TOKENS,) * number
        self._now = 0.0
        self._due = [0.0] * number

    def run(
        self, seconds: int, *, shares: Sequence[float], members: int, met: float, hear: bool = True, asked: int = 1
    ) -> list[float]:
        """Send each router its share of RATE; return the total desired replicas every 5 s.

        ``met`` is the share of first tokens within the SLO.

        Each router is read ``asked`` times before the other routers receive its value. Without ``hear``, the routers
        detect that they receive no values of each other.
        """
        sums = []
        for _ in range(seconds):
            for number, share in enumerate(shares):
                self._due[number] += share * RATE
                while self._due[number] >= 1.0:
                    self._due[number] -= 1.0
                    window = self.scalings[number].window
                    window.add(self._now, uncached_tokens=self._tokens[number], cached_tokens=0)
                    for n in range(10):
                        window.first_token(self._now, within_slo=n < 10 * met)
            self._now += 1.0
            if self._now % ASKED_S == 0:
                self._ask(members, hear=hear, asked=asked)
                sums.append(sum(self.wishes))
        return sums

    def _ask(self, members: int, *, hear: bool, asked: int) -> None:
        known = [
            OtherRouter(desired_replicas=wish, first_tokens=scaling.window.first_tokens(self._now))
            for wish, scaling in zip(self.wishes, self.scalings, strict=True)
        ]
        for number, scaling in enumerate(self.scalings):
            others = (*known[:number], *known[number + 1 :])
            for _ in range(asked):
                got = scaling.signals(self._now, status(members), others=others if hear else None)
            self.wishes[number] = got.desired_replicas


@pytest.mark.parametrize("shares", [(0.25,) * 4, (0.7, 0.2, 0.1, 0.0), (1.0, 0.0, 0.0, 0.0)])
def test_several_routers_desire_as_many_members_as_one_router(shares: Sequence[float]) -> None:
    alone, four = Routers(1), Routers(4)
    one = alone.run(300, shares=(1.0,), members=12, met=0.5)
    together = four.run(300, shares=shares, members=12, met=0.5, asked=3)
    assert max(one) > 12
    # The first value is excluded, because four routers cannot evenly share its few requests.
    assert together[1:] == pytest.approx(one[1:], rel=0.03)


def test_traffic_moved_between_routers_is_not_counted_twice() -> None:
    """An Envoy that reconnects sends its requests to another router."""
    alone, two = Routers(1), Routers(2)
    wishes = {}
    for name, routers, first, then in (("one", alone, (1.0,), (1.0,)), ("two", two, (0.05, 0.95), (0.95, 0.05))):
        routers.run(90, shares=first, members=8, met=0.5)
        routers.run(600, shares=first, members=8, met=1.0)
        routers.run(120, shares=then, members=8, met=1.0)
        wishes[name] = routers.run(60, shares=then, members=8, met=0.5)[-1]
    assert wishes["one"] > 8
    assert wishes["two"] == pytest.approx(wishes["one"], rel=0.03)


def test_router_with_large_demand_reduces_demand_of_the_other() -> None:
    """One router has long prompts and needs most of the instances, so the other router's demand is only the rest."""
    routers = Routers(2, tokens=(TOKENS // 10, 9 * TOKENS))
    sums = routers.run(65, shares=(0.9, 0.1), members=8, met=0.5)
    assert routers.wishes[1] > 0.1 * 8
    assert sums[-1] == pytest.approx(8, rel=0.03)


def test_routers_without_traffic_remove_added_members_from_demand() -> None:
    alone, two = Routers(1), Routers(2)
    wishes = {}
    for name, routers, first, then in (("one", alone, (1.0,), (1.0,)), ("two", two, (0.5, 0.5), (1.0, 0.0))):
        routers.run(90, shares=first, members=8, met=0.5)
        routers.run(120, shares=then, members=8, met=0.5)
        wishes[name] = routers.run(120, shares=first, members=8, met=1.0)[-1]
    assert wishes["one"] > 8
    assert wishes["two"] == pytest.approx(wishes["one"], rel=0.05)


def test_missing_router_reports_add_no_members() -> None:
    four = Routers(4)
    before = four.run(300, shares=(0.25,) * 4, members=4, met=0.5)[-1]
    needed = 2 * RATE * TOKENS / SPEED
    assert needed < before < 1.2 * needed
    silent = four.run(300, shares=(0.25,) * 4, members=8, met=0.5, hear=False)
    assert max(silent) == pytest.approx(before, rel=0.02)
    assert max(four.run(round(WINDOW_S), shares=(0.25,) * 4, members=8, met=0.5)) > 8
