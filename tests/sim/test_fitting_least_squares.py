"""Tests of robust least squares: exact data, outliers, and coefficients that are not negative."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualmap_sim.fitting.least_squares import Problem, _not_negative, interval

ROWS = [(1.0, float(n), float(n * n)) for n in range(10, 210)]
TRUE = (0.5, 0.02, 1e-4)


def seconds(coefficients: tuple[float, ...], rows: list[tuple[float, ...]]) -> list[float]:
    return [sum(a * b for a, b in zip(coefficients, row, strict=True)) for row in rows]


def test_exact_times_give_exact_coefficients_with_narrow_intervals() -> None:
    problem = Problem(ROWS, seconds(TRUE, ROWS))
    assert problem.best() == pytest.approx(TRUE, rel=1e-6)
    drawn = problem.resampled()
    for number, value in enumerate(TRUE):
        assert interval(drawn.column(number)) == pytest.approx((value, value), rel=1e-5)


def test_few_slow_answers_hardly_matter() -> None:
    times = seconds(TRUE, ROWS)
    for number in range(0, len(times), 10):
        times[number] *= 20
    assert Problem(ROWS, times).best() == pytest.approx(TRUE, rel=0.05)


def test_column_without_values_has_the_coefficient_zero() -> None:
    rows = [(*row, 0.0) for row in ROWS]
    problem = Problem(rows, seconds(TRUE, ROWS))
    assert problem.best() == pytest.approx((*TRUE, 0.0), rel=1e-6)
    assert (problem.has(2), problem.has(3)) == (True, False)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_coefficients_are_the_best_of_all_that_are_not_negative(seed: int) -> None:
    generator = np.random.default_rng(seed)
    matrix = generator.normal(size=(30, 4))
    target = np.ones(30)
    best = min(
        (
            float(((matrix[:, list(kept)] @ solved - target) ** 2).sum())
            for size in range(1, 5)
            for kept in combinations(range(4), size)
            if (solved := np.linalg.lstsq(matrix[:, list(kept)], target, rcond=None)[0]).min() >= 0
        ),
        default=30.0,
    )
    solved = _not_negative(matrix, np.ones(30))
    assert solved.min() >= 0
    assert float(((matrix @ solved - target) ** 2).sum()) == pytest.approx(best, rel=1e-6)
