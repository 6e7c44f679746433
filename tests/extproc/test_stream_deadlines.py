"""Tests of the timer for the deadlines of streams."""

import pytest

from dualmap_extproc.transport.processor import _StreamDeadlines
from waiting import until


class Due:
    """A stream whose deadline has passed."""

    def __init__(self, *, fails: bool = False) -> None:
        self.deadline_s: float | None = 0.0
        self._fails = fails

    def on_deadline(self, now: float) -> list[str]:
        if self._fails:
            raise ValueError("the text of a prompt")
        self.deadline_s = None
        return ["answer"]


async def test_error_at_a_deadline_ends_no_other_deadline(caplog: pytest.LogCaptureFixture) -> None:
    deadlines, written = _StreamDeadlines(), []
    deadlines.watch(Due(fails=True), written.append)
    deadlines.watch(Due(), written.append)
    await until(lambda: written == [["answer"]])
    deadlines.watch(Due(), written.append)
    await until(lambda: len(written) == 2)
    assert [each.getMessage() for each in caplog.records] == ["Unexpected error at a deadline"]
    assert "prompt" not in str(vars(caplog.records[0]))
