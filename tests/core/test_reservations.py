"""The content of the ConfigMap that reserves model names for namespaces."""

import pytest

from dualmap.objects.reservations import can_be_reserved, names_in, names_text, read_reservations

NAMES = ("gpt-prod", "Qwen/Qwen2.5-7B", "with space", "a: b", '"quoted"')


def test_reserved_names_survive_their_text() -> None:
    assert names_in(names_text(NAMES)) == NAMES
    assert all(can_be_reserved(name) for name in NAMES)


def test_reservations_of_a_chart_precede_those_of_the_operator() -> None:
    data = {"b": "x\ny\n", "a": "y\n", "fixed.prod": "x", "fixed.llm": "z"}
    assert read_reservations(data) == {"x": "prod", "y": "a", "z": "llm"}


@pytest.mark.parametrize("data", [{}, {"a": None}, {"a": 3}, {"a": ["x"]}, {"a": ""}, {"a": "\n \n"}])
def test_invalid_reservations_count_as_absent(data: dict[str, object]) -> None:
    assert read_reservations(data) == {}


@pytest.mark.parametrize("name", [" x", "x ", "x\ny", "\n", "", "\tx"])
def test_name_that_a_line_cannot_contain_is_not_reserved(name: str) -> None:
    assert not can_be_reserved(name)
