"""Tests of the log lines of a pool reload."""

import logging
from dataclasses import replace

import pytest

from dualmap.pools.pool import Member, MemberState, Slo
from dualmap_extproc.pools.changes import log_changes
from extproc.envoy_messages import pool


@pytest.fixture(autouse=True)
def all_levels(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "dualmap_extproc")


def said(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str, dict[str, object]]]:
    return [(each.levelname, each.getMessage(), each.__dict__["details"]) for each in caplog.records]


def test_log_changes_lists_added_removed_and_changed_members(caplog):
    before = pool(members=3)
    moved = replace(before.members[1], address="10.9.9.9")
    new = Member(id="qwen-9", address="10.0.0.9", port=8000)
    after = replace(before, members=(before.members[0], moved, new), ring_version=2)

    log_changes((before,), (after,))

    details = {"pool": "llm/qwen", "ring_version": 2, "added": ["qwen-9"], "removed": ["qwen-2"]}
    assert said(caplog) == [
        ("INFO", "Reloaded pool", details | {"changed": ["qwen-1 (address 10.9.9.9:8000)"], "settings": []})
    ]


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({"leave_at_s": 1.8e9, "state": MemberState.DRAINING}, "state Draining, leaveAt 2027-01-15T08:00:00Z"),
        ({"weight": 50, "incarnation": "a-1"}, "weight 50, incarnation new"),
        ({"address": "10.0.0.9", "port": 9000}, "address 10.0.0.9:9000"),
    ],
)
def test_log_changes_says_what_has_changed_of_a_member(caplog, change, shown):
    before = pool(members=2)
    after = replace(before, members=(before.members[0], replace(before.members[1], **change)))

    log_changes((before,), (after,))
    log_changes((replace(before, members=after.members),), (before,))

    first, back = (details["changed"] for _, _, details in said(caplog))
    assert first == [f"qwen-1 ({shown})"]
    assert ("leaveAt none" in back[0]) == ("leave_at_s" in change)


def test_log_changes_lists_changed_settings_of_changed_pools(caplog):
    before = pool("a"), pool("b")

    log_changes(before, (before[0], replace(before[1], slo=Slo(ttft_s=1.0))))

    ((_, _, details),) = said(caplog)
    assert details["pool"] == "llm/b"
    assert details["settings"] == ["slo"]


def test_log_changes_asks_for_new_envoy_config_if_pools_change(caplog):
    log_changes((pool("old"),), (pool("new", members=1),))

    lines = said(caplog)
    assert [(level, details["pool"]) for level, _, details in lines] == [("WARNING", "llm/new"), ("WARNING", "llm/old")]
    assert all(
        "if Envoy's bootstrap comes from envoy-config --pool, run envoy-config again" in sentence
        for _, sentence, _ in lines
    )


@pytest.mark.parametrize(("version", "warnings"), [(4, 1), (6, 0), (0, 0)])
def test_log_changes_warns_of_a_decreased_ring_version(caplog, version, warnings):
    before = replace(pool(), ring_version=5)

    log_changes((before,), (replace(before, ring_version=version),))

    warned = [(sentence, details) for level, sentence, details in said(caplog) if level == "WARNING"]
    assert len(warned) == warnings
    assert all("Ring version decreased" in sentence and details["before"] == 5 for sentence, details in warned)


def test_log_changes_shortens_a_long_member_list(caplog):
    log_changes((pool(members=0),), (pool(members=50),))

    ((_, _, details),) = said(caplog)
    added = details["added"]
    assert isinstance(added, list)
    assert len(added) == 21
    assert added[-1] == "and 30 more"


@pytest.mark.parametrize(("max_wait_s", "warnings"), [(31.0, 1), (30.0, 0), (1.0, 0)])
def test_log_changes_asks_for_new_envoy_config_if_max_wait_grows(caplog, max_wait_s, warnings):
    before = pool()
    queue = replace(before.routing.queue, max_wait_s=max_wait_s)

    log_changes((before,), (replace(before, routing=replace(before.routing, queue=queue)),))

    warned = [sentence for level, sentence, _ in said(caplog) if level == "WARNING"]
    assert len(warned) == warnings
    assert all(
        "maxWait" in sentence
        and "if Envoy's bootstrap comes from envoy-config --pool, run envoy-config again" in sentence
        for sentence in warned
    )
