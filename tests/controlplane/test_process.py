"""Tests of the operator's end.

The operator exits immediately after the loss of its Lease, because kopf could still write.
"""

import asyncio
from collections.abc import Callable

import pytest
from kopf._cogs.clients.errors import APINotFoundError

from dualmap_operator.run import process
from dualmap_operator.run.control import ended
from dualmap_operator.run.leader import LeadershipLostError
from dualmap_operator.run.metrics import Metrics


class ExitedError(Exception):
    """Raised instead of an exit of the process."""


class FakeControl:
    """A control loop that runs until cancelled and then writes once more, as kopf may."""

    def __init__(self) -> None:
        self.wrote: list[str] = []

    async def run(self, started: Callable[[], None]) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.wrote.append("a finalizer")

    def stop(self) -> None:
        self.wrote.append("in order")


class FakeServer:
    async def close(self) -> None:
        await asyncio.sleep(0)


class LostLeadership:
    async def renew(self) -> None:
        raise LeadershipLostError("the lease was not renewed")


async def test_operator_process_exits_before_any_write_after_lost_lease(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    control = FakeControl()
    written: list[list[str]] = []

    def exit_at_once(code: int) -> None:
        assert code == 1
        written.append(list(control.wrote))
        raise ExitedError

    parts = process.Process(server=FakeServer(), leadership=LostLeadership(), control=control, metrics=Metrics())  # type: ignore[arg-type]  # stand for them
    monkeypatch.setattr(process.os, "_exit", exit_at_once)
    with pytest.raises(ExitedError):
        await parts._lead(asyncio.Event())

    assert written == [[]]
    assert "the lease was not renewed" in capsys.readouterr().err


def test_operator_error_contains_missing_crd_or_other_cause() -> None:
    gone = APINotFoundError("404 page not found", status=404, headers={})

    assert str(ended(gone)).startswith("the API server no longer serves InferencePools; is the CRD deleted?")
    assert str(ended(ValueError("odd"))) == "a task of the operator ended unexpectedly: ValueError('odd')"
