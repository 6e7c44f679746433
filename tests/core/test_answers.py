"""Tests of the time in which answers are expected to end."""

from math import inf

import pytest

from dualmap.fleet.answers import AnswerTimes


@pytest.mark.parametrize(
    ("durations_s", "expected_s"),
    [
        ((), inf),
        ((1.0,) * 7, inf),
        ((1.0,) * 8, 1.0),
        ((*range(1, 21),), 19),
        ((*range(100, 0, -1),), 95),
        ((*range(1000, 0, -1),), 122),
    ],
)
def test_expected_answer_is_longer_than_nearly_all_last_answers(
    durations_s: tuple[float, ...], expected_s: float
) -> None:
    answers = AnswerTimes()
    for each in durations_s:
        answers.add(each)
    assert answers.expected_s() == expected_s
