"""Tests of the comparison of commits."""

import importlib
from pathlib import Path
from types import ModuleType

import click
import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def commits(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("bench.commits")


def test_round_measures_every_part_at_both_sizes(commits: ModuleType) -> None:
    with commits.turns_of(str(ROOT)) as made:
        times_us = made.take()
        assert made.take().keys() == times_us.keys()
    parts = ("pick", "first token and end", "call")
    assert times_us.keys() == {f"{part}, {size_kb} KB" for part in parts for size_kb in (1, 64)}
    assert all(each > 0 for each in times_us.values())


def test_unknown_commit_is_an_error(commits: ModuleType) -> None:
    with pytest.raises(click.ClickException), commits.turns("no-such-commit"):
        pass


def test_process_that_ends_is_an_error(commits: ModuleType, tmp_path: Path) -> None:
    """The folder has no code."""
    with commits.turns_of(str(tmp_path)) as made, pytest.raises(click.ClickException, match="a process has ended"):
        made.take()
