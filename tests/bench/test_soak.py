"""Tests that the soaks serve their calls, and that neither lost connections nor restarts leave a request behind."""

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


async def test_soak_leaves_no_open_request(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    soak = importlib.import_module("bench.soak")
    monkeypatch.setattr(soak, "CONNECTIONS", 2)
    monkeypatch.setattr(soak, "PROMPTS", 40)
    await soak.soak(80)
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[0] for row in rows] == ["40", "80"]
    assert [row[-1] for row in rows] == ["0", "0"]


async def test_restarts_and_renewals_lose_no_request(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    restarts = importlib.import_module("bench.restarts")
    monkeypatch.setattr(restarts, "ROUNDS", 2)
    monkeypatch.setattr(restarts, "PROMPTS", 40)
    await restarts.run(160)
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[0] for row in rows] == ["80", "160"]
    assert [row[-1] for row in rows] == ["0", "0"]
