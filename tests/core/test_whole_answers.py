"""What whole answers teach about a member's speed: responses without streaming, of which only the duration is known."""

import random
from collections.abc import Callable
from itertools import count

import pytest

from builders import pool, request, text_of
from dualmap.fleet.answer_cost import AnswerCost
from dualmap.fleet.estimate import LearntSpeed
from dualmap.fleet.samples import AGREEMENT, Agreement
from dualmap.replicas.update import HotnessCounts, ReplicaUpdate, SharedLoad
from dualmap.requests import Decision, Request, Usage
from dualmap.router import PoolRouter

SPEED = 7000.0
TOKENS = 1400
OUTPUT_TOKENS = 100
HONEST, HOSTILE = 1, 2


class Site:
    """A pool of three members whose answers take 0.7 s; ``slow`` answers of m-0 take 2.8 s."""

    def __init__(self) -> None:
        self.router = PoolRouter(pool(3))
        self.endpoints = [each.endpoint for each in self.router.status().endpoints]
        self.now = 0.0
        self._ids = count()

    def ask(self, member: int | None, change: Callable[[Request], Request] = lambda asked: asked) -> str:
        """Send a request to a member, or to the one that the router chooses; return its id."""
        name = str(next(self._ids))
        subset = None if member is None else frozenset({self.endpoints[member]})
        asked = request(name, text_of(TOKENS, name), now=self.now, subset=subset)
        decision = self.router.on_request(self.now, change(asked._replace(streamed=False))).answer
        assert isinstance(decision, Decision)
        return name

    def answer(
        self, member: int | None, *, seconds: float = 0.7, change: Callable[[Request], Request] = lambda each: each
    ) -> None:
        """Send a request to a member, and answer it after ``seconds``."""
        name = self.ask(member, change)
        self.now += seconds
        self.router.on_finished(self.now, name)
        self.router.on_usage(self.now, name, Usage(prompt_tokens=TOKENS, completion_tokens=OUTPUT_TOKENS))

    def warm(self) -> None:
        """Let all members answer alike."""
        for number in range(60):
            self.answer(number % 3)

    @property
    def speeds(self) -> list[float]:
        return [each.prefill_tokens_per_second for each in self.router.status().endpoints]


def end(site: Site, name: str, **counts: int) -> None:
    usage = {"prompt_tokens": TOKENS, "completion_tokens": OUTPUT_TOKENS} | counts
    site.router.on_finished(site.now, name)
    site.router.on_usage(site.now, name, Usage(**usage))


def test_whole_answers_of_a_slow_member_lower_its_speed() -> None:
    site = Site()
    site.warm()
    for _ in range(15):
        site.answer(0, seconds=2.8)
    assert site.speeds == pytest.approx([SPEED / AGREEMENT, SPEED, SPEED])


def test_whole_answers_with_usage_at_their_end_teach_the_same() -> None:
    site = Site()
    site.warm()
    for _ in range(15):
        name = site.ask(0)
        site.now += 2.8
        site.router.on_finished(site.now, name, Usage(completion_tokens=OUTPUT_TOKENS))
    assert site.speeds == pytest.approx([SPEED / AGREEMENT, SPEED, SPEED])


def test_whole_answers_of_many_output_tokens_are_not_slow() -> None:
    site = Site()
    chance = random.Random(1)
    for number in range(200):
        name, tokens = site.ask(number % 3), chance.randint(1, 1000)
        site.now += 0.2 + 0.005 * (tokens if number < 150 else 1000)
        end(site, name, completion_tokens=tokens if number < 150 else 1000)
    for _ in range(20):
        name = site.ask(0)
        site.now += 0.2 + 0.005 * 1000
        end(site, name, completion_tokens=1000)
    assert site.speeds == pytest.approx([SPEED] * 3, rel=0.1)


def ends_without_usage(site: Site) -> None:
    name = site.ask(0)
    site.now += 2.8
    site.router.on_finished(site.now, name)


def ends_without_completion_tokens(site: Site) -> None:
    name = site.ask(0)
    site.now += 2.8
    site.router.on_finished(site.now, name, Usage(prompt_tokens=TOKENS))


def is_aborted(site: Site) -> None:
    name = site.ask(0)
    site.now += 2.8
    site.router.on_aborted(site.now, name)
    site.router.on_usage(site.now, name, Usage(prompt_tokens=TOKENS, completion_tokens=OUTPUT_TOKENS))


def has_two_answers(site: Site) -> None:
    site.answer(0, seconds=2.8, change=lambda asked: asked._replace(sequences=2))


def has_another_prompt_than_estimated(site: Site) -> None:
    name = site.ask(0)
    site.now += 2.8
    end(site, name, prompt_tokens=3 * TOKENS)


def arrives_in_parts(site: Site) -> None:
    name = site.ask(0)
    site.now += 2.0
    site.router.on_first_token(site.now, name)
    site.now += 0.8
    end(site, name)


def is_served_elsewhere(site: Site) -> None:
    name = site.ask(1)
    site.now += 2.8
    site.router.on_served(site.now, name, site.endpoints[0])
    end(site, name)


def waits_for_prefills_of_another_router(site: Site) -> None:
    others = SharedLoad(pending_prefill_tokens=9000, backlog_s=1.3, in_flight=1, active_kv_tokens=9000)
    update = ReplicaUpdate(hotness=HotnessCounts(requests=0, nodes={}), loads={"m-0": others})
    site.router.on_update(site.now, "another router", update, 0.0)
    site.answer(0, seconds=2.8)


def is_very_short(site: Site) -> None:
    name = str(site.now)
    asked = request(name, text_of(40, name), now=site.now, subset=frozenset({site.endpoints[0]}))
    site.router.on_request(site.now, asked._replace(streamed=False))
    site.now += 2.8
    end(site, name, prompt_tokens=40, completion_tokens=20)


@pytest.mark.parametrize(
    "answer",
    [
        ends_without_usage,
        ends_without_completion_tokens,
        is_aborted,
        has_two_answers,
        has_another_prompt_than_estimated,
        arrives_in_parts,
        is_served_elsewhere,
        waits_for_prefills_of_another_router,
        is_very_short,
    ],
)
def test_whole_answer_of_unknown_cost_teaches_nothing(answer: Callable[[Site], None]) -> None:
    site = Site()
    site.warm()
    for _ in range(15):
        answer(site)
    assert site.speeds == pytest.approx([SPEED] * 3)


def test_whole_answers_behind_other_prefills_are_not_slow() -> None:
    """Each member gets three prompts at once; the prefills take 0.2 s and run one after the other."""
    site = Site()
    site.warm()
    for _ in range(20):
        names = [site.ask(0) for _ in range(3)]
        site.now += 3 * 0.2 + 0.5
        for name in names:
            end(site, name)
    assert min(site.speeds) > 0.75 * SPEED


def test_whole_answers_speed_returns_without_new_answers_of_the_member() -> None:
    site = Site()
    site.warm()
    for _ in range(15):
        site.answer(0, seconds=2.8)
    for number in range(150):
        site.answer(1 + number % 2)
    assert site.speeds[0] == pytest.approx(SPEED, rel=0.05)
    site.ask(0)
    assert site.speeds[0] == pytest.approx(SPEED / AGREEMENT), "until the answer arrives, the member counts as slow"


def test_whole_answer_that_never_ends_does_not_keep_the_speed_low() -> None:
    """After two minutes of silence, the router assumes that it missed the answer's end."""
    site = Site()
    site.warm()
    for _ in range(15):
        site.answer(0, seconds=2.8)
    site.ask(0)
    for _ in range(400):
        site.answer(None)
    assert site.speeds[0] == pytest.approx(SPEED, rel=0.05)


def test_whole_answer_to_an_old_member_shows_that_it_is_fast_again() -> None:
    site = Site()
    site.warm()
    for _ in range(15):
        site.answer(0, seconds=2.8)
    for number in range(150):
        site.answer(1 + number % 2)
    site.answer(0)
    assert site.speeds[0] == pytest.approx(SPEED)


class Members:
    """Three members that answer alike, each answer expected to take a second."""

    def __init__(self) -> None:
        agreement = Agreement()
        self.speeds = [LearntSpeed(SPEED, agreement, lambda: None) for _ in range(3)]
        for number in range(90):
            self.answer(number % 3, client=HONEST)

    def answer(self, member: int, *, client: int, seconds: float = 1.0) -> None:
        self.speeds[member].observe_answer(0.0, client, work_s=0.2, tokens=100, seconds=seconds)

    @property
    def slowness(self) -> list[float]:
        return [SPEED / each.current.tokens_per_second for each in self.speeds]


@pytest.mark.parametrize("seconds", [1e-6, 1e-3, 100.0, 1e9])
def test_whole_answers_of_one_client_change_the_speed_within_the_bounds(seconds: float) -> None:
    members = Members()
    for number in range(400):
        members.answer(0, client=HOSTILE, seconds=seconds)
        if not number % 4:
            for member in range(3):
                members.answer(member, client=HONEST)
    assert max(members.slowness) <= AGREEMENT * (1 + 1e-9)
    assert min(members.slowness) >= 1 / AGREEMENT * (1 - 1e-9)


@pytest.mark.parametrize("seconds", [1e-6, 1e9])
def test_whole_answers_of_a_minority_change_nothing(seconds: float) -> None:
    members = Members()
    for number in range(400):
        for member in range(3):
            members.answer(member, client=HOSTILE if not number % 3 else HONEST, seconds=1.0 if number % 3 else seconds)
    assert members.slowness == pytest.approx([1.0] * 3, rel=0.1)


def test_whole_answers_fast_ones_of_a_client_with_half_change_no_speed() -> None:
    members = Members()
    for _ in range(100):
        members.answer(0, client=HOSTILE, seconds=1e-3)
        for member in range(3):
            members.answer(member, client=HONEST)
    assert members.slowness == pytest.approx([1.0] * 3, rel=0.1)


def test_answer_cost_answers_of_different_lengths_tell_prefill_from_decoding() -> None:
    cost, chance = AnswerCost(), random.Random(1)
    for _ in range(300):
        work_s, tokens = chance.uniform(0.01, 2.0), chance.randint(1, 1000)
        cost.observe(work_s, tokens, 0.5 * work_s + 0.004 * tokens)
    assert cost.expected_s(1.0, 0) == pytest.approx(0.5, rel=0.05)
    assert cost.expected_s(0.0, 100) == pytest.approx(0.4, rel=0.05)


@pytest.mark.parametrize("seconds", [1e-9, 1e-3, 1.0, 1e9])
@pytest.mark.parametrize(("work_s", "tokens"), [(0.2, 0), (0.0, 100), (0.2, 1), (1e-6, 10**9), (1e4, 1)])
def test_answer_cost_any_answers_leave_a_positive_expectation(seconds: float, work_s: float, tokens: int) -> None:
    cost = AnswerCost()
    for _ in range(50):
        cost.observe(work_s, tokens, seconds)
    assert cost.expected_s(0.0, 1) > 0.0
    assert cost.expected_s(1e-3, 0) > 0.0
    assert 0.0 <= cost.prefill_part <= 1.0
