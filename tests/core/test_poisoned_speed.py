"""Learnt speeds under attack: prompts whose estimated tokens are far from what the engine computes."""

from itertools import count

import pytest

from builders import pool, request, text_of
from dualmap.fleet.estimate import LearntSpeed
from dualmap.fleet.ledger import ENDED_MAX
from dualmap.fleet.samples import Agreement, RecentPrefills
from dualmap.requests import Decision, Usage
from dualmap.router import PoolRouter

SPEED = 7000.0
UNNAMED, HONEST, HOSTILE = 0, 1, 2


class Site:
    """A router whose engines compute 7000 tokens/s, and an honest and a hostile client."""

    def __init__(self) -> None:
        self.router = PoolRouter(pool(4))
        self.now = 0.0
        self._ids = count()

    def prefill(
        self, *, tokens: int, computed: int, client: int, usage: bool = False, counted: int = 0, text: str = ""
    ) -> None:
        """Send a prompt that is estimated as ``tokens``, and answer when the engine has computed ``computed``.

        The engine's usage has ``counted`` tokens, 0 for as many as were computed.
        """
        name = str(next(self._ids))
        decision = self.router.on_request(
            self.now, request(name, text_of(tokens, text or name), now=self.now, client=client)
        ).answer
        assert isinstance(decision, Decision)
        self.now += computed / SPEED
        self.router.on_first_token(self.now, name)
        self.router.on_finished(self.now, name, Usage(prompt_tokens=counted or computed) if usage else None)

    @property
    def speeds(self) -> list[float]:
        return [each.prefill_tokens_per_second for each in self.router.status().endpoints]


def test_speed_is_not_poisoned_by_fast_prefills_of_one_client() -> None:
    site = Site()
    for _ in range(60):
        site.prefill(tokens=2000, computed=2000, client=HONEST)
    for _ in range(32):
        site.prefill(tokens=120_000, computed=1000, client=HOSTILE)
        site.prefill(tokens=2000, computed=2000, client=HONEST)
    assert max(site.speeds) < 2 * SPEED


def test_speed_is_not_poisoned_by_half_of_all_prefills() -> None:
    speed = LearntSpeed(SPEED, Agreement(), lambda: None)
    for number in range(620):
        hostile = number > 20 and number % 2
        speed.observe(
            0.1 * number,
            client=HOSTILE if hostile else HONEST,
            new_tokens=100_000 if hostile else 2000,
            cached_tokens=0,
            service_s=0.03 if hostile else 2000 / SPEED,
            solo=True,
        )
    assert speed.current.tokens_per_second < 1.5 * SPEED


def test_speed_of_unnamed_clients_is_learnt_without_usage() -> None:
    site = Site()
    for _ in range(200):
        site.prefill(tokens=3000, computed=2000, client=UNNAMED)
    assert max(site.speeds) > 1.3 * SPEED


def test_speed_of_unnamed_clients_follows_no_minority() -> None:
    site = Site()
    for number in range(300):
        if number % 3:
            site.prefill(tokens=2000, computed=2000, client=UNNAMED)
        else:
            site.prefill(tokens=120_000, computed=1000, client=UNNAMED)
    assert max(site.speeds) < 2 * SPEED


def test_speed_is_not_poisoned_by_prefills_whose_usage_disagrees() -> None:
    site = Site()
    for _ in range(100):
        site.prefill(tokens=120_000, computed=1000, client=0, usage=True)
    assert max(site.speeds) == pytest.approx(SPEED)


def test_speed_is_learnt_from_prefills_whose_usage_agrees() -> None:
    site = Site()
    for _ in range(200):
        site.prefill(tokens=3000, computed=2000, client=0, usage=True, counted=3000)
    assert max(site.speeds) > 1.3 * SPEED


def test_speed_is_not_learnt_from_a_short_prefill() -> None:
    speed = LearntSpeed(SPEED, Agreement(), lambda: None)
    for tokens, learns in ((63, False), (64, True)):
        lesson = speed.observe(0.0, client=0, new_tokens=tokens, cached_tokens=0, service_s=1.0, solo=True)
        assert (lesson is not None) == learns


def test_speed_usage_after_the_end_takes_a_lesson_back() -> None:
    site = Site()
    for number in range(20):
        site.prefill(tokens=20_000, computed=1000, client=0)
        site.router.on_usage(site.now, str(number), Usage(prompt_tokens=1000))
    assert max(site.speeds) == pytest.approx(SPEED)


def test_speed_late_usage_corrects_a_bounded_number_of_requests() -> None:
    site = Site()
    for _ in range(ENDED_MAX + 1):
        site.prefill(tokens=1000, computed=100, client=0)
    learnt = site.speeds
    site.router.on_usage(site.now, "0", Usage(prompt_tokens=100))
    assert site.speeds == learnt
    site.router.on_usage(site.now, str(ENDED_MAX), Usage(prompt_tokens=100))
    assert site.speeds != learnt


def test_recent_prefills_minority_does_not_change_the_bound() -> None:
    recent = RecentPrefills(Agreement())
    for _ in range(8):
        recent.accept(0.0, HONEST, 1.0)
    assert [recent.accept(0.0, client, 0.01) for client in range(10, 17)] == [0.5] * 7


@pytest.mark.parametrize(("slowness", "taught"), [(0.01, 0.5), (0.6, 0.6), (2.9, 2.9), (100.0, 3.0)])
def test_recent_prefills_outlier_counts_as_the_nearest_allowed_one(slowness: float, taught: float) -> None:
    recent = RecentPrefills(Agreement())
    assert recent.accept(0.0, HOSTILE, slowness) == taught


def test_recent_prefills_of_one_client_fill_about_half() -> None:
    recent = RecentPrefills(Agreement())
    recent.accept(0.0, HONEST, 1.0)
    taught = [recent.accept(1.0, HOSTILE, 0.1) for _ in range(20)]
    assert taught.count(None) == 12
    assert recent.accept(62.0, HOSTILE, 0.1) is not None, "no other client had a prefill for a minute"


def test_recent_prefills_of_one_client_do_not_become_old_by_samples_of_others() -> None:
    agreement = Agreement()
    agreement.join("another member", lambda: None)
    recent = RecentPrefills(agreement)
    for _ in range(8):
        recent.accept(0.0, HOSTILE, 0.1)
    recent.accept(1.0, HONEST, 1.0)
    for second in range(40):
        agreement.count()
        assert recent.accept(float(second), HOSTILE, 0.1) is None


def test_recent_prefills_member_agrees_with_the_others_at_first() -> None:
    agreement = Agreement()
    for _ in range(3):
        other = RecentPrefills(agreement)
        for _ in range(10):
            other.accept(0.0, HONEST, 1.0)
    recent = RecentPrefills(agreement)
    taught = [recent.accept(0.0, HONEST, 0.05) for _ in range(80)]
    assert taught[30] == pytest.approx(1 / 3), "30 prefills do not outweigh three members"
    assert taught[-1] == pytest.approx(0.05)


def test_recent_prefills_accept_a_prefill_after_all_were_withdrawn() -> None:
    recent = RecentPrefills(Agreement())
    for _ in range(20):
        recent.accept(0.0, HONEST, 1.0)
    for _ in range(20):
        recent.withdraw(HONEST, 1.0)
    assert recent.accept(0.0, HONEST, 0.5) == 0.5


def test_speed_retracted_lessons_leave_the_prior() -> None:
    speed = LearntSpeed(SPEED, Agreement(), lambda: None)
    lessons = [
        speed.observe(0.0, client=0, new_tokens=5000, cached_tokens=100 * each, service_s=0.3, solo=True)
        for each in range(10)
    ]
    for lesson in lessons:
        assert lesson is not None
        speed.retract(lesson)
    assert speed.current.tokens_per_second == pytest.approx(SPEED)


def test_speed_retracted_after_a_disturbed_prefill_leaves_both_speeds() -> None:
    speed = LearntSpeed(SPEED, Agreement(), lambda: None)
    lessons = [
        speed.observe(0.0, client=0, new_tokens=5000, cached_tokens=0, service_s=0.3, solo=solo)
        for solo in (True, True, False, True)
    ]
    assert speed.solo_tokens_per_second != speed.current.tokens_per_second
    for lesson in lessons:
        assert lesson is not None
        speed.retract(lesson)
    assert speed.current.tokens_per_second == pytest.approx(SPEED)
    assert speed.solo_tokens_per_second == pytest.approx(SPEED)
