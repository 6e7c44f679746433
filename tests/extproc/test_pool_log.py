"""Tests of the log lines about members whose time to leave passes."""

import logging
from dataclasses import replace

import pytest

from dualmap.pools.pool import MemberState, Pool
from dualmap_extproc.request.observations import FanOut
from dualmap_extproc.request.picker import Picker
from dualmap_extproc.settings import Limits
from dualmap_extproc.telemetry.pool_log import log_pool_events
from extproc.envoy_messages import pool


@pytest.fixture
def picker(caplog: pytest.LogCaptureFixture) -> Picker:
    caplog.set_level(logging.INFO, "dualmap_extproc")
    observations = FanOut()
    log_pool_events(observations)
    return Picker(Limits(), observations.report, id_prefix="r1", epoch_s=1000.0)


def leaving(times_s: dict[int, float]) -> Pool:
    """Return a pool with members that leave at times on the picker's clock, by the member's number."""
    made = pool(members=3)
    members = list(made.members)
    for number, time_s in times_s.items():
        members[number] = replace(members[number], state=MemberState.DRAINING, leave_at_s=1000.0 + time_s)
    return replace(made, members=tuple(members))


def said(caplog: pytest.LogCaptureFixture) -> list[tuple[str, dict[str, object]]]:
    lines = [(each.message, each.__dict__["details"]) for each in caplog.records]
    caplog.clear()
    return lines


def line(*members: str) -> tuple[str, dict[str, object]]:
    return "Members reached their time to leave", {"pool": "llm/qwen", "members": list(members)}


def test_time_to_leave_that_passes_is_one_log_line(picker: Picker, caplog: pytest.LogCaptureFixture) -> None:
    picker.set_pools(0.0, [leaving({0: 30.0, 1: 60.0})])
    assert said(caplog) == []
    for member in ("qwen-0", "qwen-1"):
        deadline_s = picker.next_deadline()
        assert deadline_s is not None
        picker.on_deadline(deadline_s)
        assert said(caplog) == [line(member)]
    picker.on_deadline(90.0)
    assert said(caplog) == []


def test_time_to_leave_that_has_passed_is_logged_with_the_pool(
    picker: Picker, caplog: pytest.LogCaptureFixture
) -> None:
    picker.set_pools(10.0, [leaving({0: -30.0, 2: 5.0})])
    picker.on_deadline(10.0)
    assert said(caplog) == [line("qwen-0", "qwen-2")]
    picker.set_pools(20.0, [leaving({0: -30.0, 2: 300.0})])
    assert said(caplog) == []
    picker.set_pools(400.0, [leaving({0: -30.0, 2: 350.0})])
    assert said(caplog) == [line("qwen-2")]
