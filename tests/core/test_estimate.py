import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualmap.fleet.estimate import LearntSpeed, PrefillModel, Speed
from dualmap.fleet.samples import Agreement


def learn(model: PrefillModel, truth: Speed, samples: int, *, noise: float = 0.0) -> None:
    chance = random.Random(3)
    for _ in range(samples):
        new, cached = chance.randrange(100, 15_000), chance.randrange(0, 10_000)
        service_s = truth.compute_s(new, cached) * (1 + chance.uniform(-noise, noise))
        model.observe(0.0, 1.0, new_tokens=new, cached_tokens=cached, service_s=service_s)


def test_prefill_estimate_learns_linear_and_quadratic_cost() -> None:
    truth = Speed(1 / 2500, 1 / 2500 * 2.0e-5)
    model = PrefillModel(7000)
    learn(model, truth, 300, noise=0.1)
    for new, cached in [(500, 0), (8000, 0), (2000, 12_000), (20_000, 0)]:
        assert abs(model.speed.compute_s(new, cached) / truth.compute_s(new, cached) - 1) < 0.1


def test_prefill_estimate_follows_a_change_of_speed() -> None:
    model = PrefillModel(7000)
    learn(model, Speed(1 / 7000, 1e-9), 100)
    learn(model, Speed(1 / 1000, 1e-9), 300)
    assert 850 < model.speed.tokens_per_second < 1150


def test_prefill_estimate_changes_little_after_a_single_outlier() -> None:
    model = PrefillModel(7000)
    learn(model, Speed(1 / 7000, 1e-9), 100)
    before = model.speed.compute_s(4000, 0)
    model.observe(0.0, 1.0, new_tokens=4000, cached_tokens=0, service_s=500.0)
    assert model.speed.compute_s(4000, 0) < 1.5 * before


@given(seed=st.integers(0, 10_000), stalled=st.floats(0, 0.6))
@settings(max_examples=60)
def test_engine_stalls_do_not_raise_the_estimated_speed(seed: int, stalled: float) -> None:
    # Separate limits for the linear and the quadratic coefficient let noise raise an estimated speed by a factor of 19.
    chance, truth, model = random.Random(seed), Speed(1 / 7000, 1 / 7000 * 1.5e-5), PrefillModel(7000)
    for _ in range(200):
        new, cached = chance.randrange(100, 20_000), chance.choice([0, chance.randrange(0, 10_000)])
        stall_s = chance.uniform(0, 20) if chance.random() < stalled else 0.0
        model.observe(0.0, 1.0, new_tokens=new, cached_tokens=cached, service_s=truth.compute_s(new, cached) + stall_s)
        for probe in [(500, 0), (5000, 5000), (20_000, 0)]:
            assert model.speed.compute_s(*probe) >= truth.compute_s(*probe) / 2


@given(
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6), st.floats(-1, 1e6)), max_size=80),
    st.integers(100, 10**6),
)
def test_prefill_estimate_stays_within_bounds_for_any_samples(
    samples: list[tuple[int, int, float]], prior: int
) -> None:
    model = PrefillModel(prior)
    for new, cached, service_s in samples:
        model.observe(0.0, 1.0, new_tokens=new, cached_tokens=cached, service_s=service_s)
    assert prior / 20.001 <= model.speed.tokens_per_second <= prior * 20.001
    assert model.speed.compute_s(1000, 0) > 0
    assert model.speed.compute_s(1000, 50_000) >= model.speed.compute_s(1000, 0)


def test_speed_without_new_samples_fades_by_samples_of_others() -> None:
    agreement, changes = Agreement(), []
    slow, *others = (LearntSpeed(7000, agreement, lambda: changes.append(0)) for _ in range(4))

    def observe(speed: LearntSpeed, now: float, *, tokens_per_second: float) -> None:
        speed.observe(now, client=0, new_tokens=2000, cached_tokens=0, service_s=2000 / tokens_per_second, solo=True)

    for _ in range(30):
        for speed in (slow, *others):
            observe(speed, 0.0, tokens_per_second=2000 if speed is slow else 7000)
    learnt = slow.current.tokens_per_second
    assert learnt < 3500
    for hour in range(14):
        for speed in others:
            observe(speed, 3600.0 * hour, tokens_per_second=7000)
    assert slow.current.tokens_per_second == pytest.approx(learnt, rel=0.02), "the hours have no effect"
    changes.clear()
    for _ in range(30):
        for speed in others:
            observe(speed, 3600.0 * 14, tokens_per_second=7000)
    assert slow.current.tokens_per_second > 6000
    assert changes
