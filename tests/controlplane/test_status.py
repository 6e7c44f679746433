import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualmap.objects.pool_reader import read_pools
from dualmap.objects.times import time_text
from dualmap.pools.pool import MemberState
from dualmap_operator.decide.observed import Condition, PoolStatus, RingMember, TrafficStatus
from dualmap_operator.decide.pod_reading import read_status
from dualmap_operator.decide.status import status_document

NOON_S = datetime(2026, 11, 22, 12, tzinfo=UTC).timestamp()


def member(id: str, **more: Any) -> RingMember:
    fields = {"address": "10.0.0.1", "port": 8000, "state": MemberState.ACTIVE, "weight": 100, "since_s": NOON_S}
    return RingMember(id=id, **{**fields, **more})


def ids(document: dict[str, Any]) -> list[str]:
    return [member["id"] for member in document["ring"]["members"]]


def test_status_has_the_documented_shape() -> None:
    status = PoolStatus(
        observed_generation=3,
        replicas=4,
        ready_replicas=3,
        in_ring=1,
        selector="serving.dualmap.dev/pool=qwen",
        ring_version=7,
        members=(member("qwen-0", incarnation="6d1a57ee-0"),),
        traffic=TrafficStatus(slo_attainment="0.97", cache_hit_rate="0.63"),
        conditions=(
            Condition(
                type="Draining",
                status=None,
                reason="Asking",
                message="no router has answered yet",
                since_s=NOON_S,
                observed_generation=3,
            ),
        ),
    )
    assert status_document(status) == {
        "observedGeneration": 3,
        "replicas": 4,
        "readyReplicas": 3,
        "inRing": 1,
        "selector": "serving.dualmap.dev/pool=qwen",
        "ring": {
            "version": 7,
            "members": [
                {
                    "id": "qwen-0",
                    "address": "10.0.0.1",
                    "port": 8000,
                    "state": "Active",
                    "weight": 100,
                    "since": "2026-11-22T12:00:00Z",
                    "incarnation": "6d1a57ee-0",
                }
            ],
        },
        "traffic": {"sloAttainment": "0.97", "cacheHitRate": "0.63"},
        "conditions": [
            {
                "type": "Draining",
                "status": "Unknown",
                "reason": "Asking",
                "message": "no router has answered yet",
                "lastTransitionTime": "2026-11-22T12:00:00Z",
                "observedGeneration": 3,
            }
        ],
    }


def test_status_omits_unknown_traffic() -> None:
    assert "traffic" not in status_document(PoolStatus())
    shown = TrafficStatus(cache_hit_rate="0.63")
    assert status_document(PoolStatus(traffic=shown))["traffic"] == {"cacheHitRate": "0.63"}


def test_status_omits_unknown_incarnation() -> None:
    assert "incarnation" not in status_document(PoolStatus(members=(member("a"),)))["ring"]["members"][0]


def test_status_members_are_ordered_by_ordinal() -> None:
    mixed = ("qwen-10", "qwen-2", "7b-qwen-1", "qwen-1", "other", "qwen-02")
    document = status_document(PoolStatus(members=tuple(member(each) for each in mixed)))
    assert ids(document) == ["7b-qwen-1", "other", "qwen-1", "qwen-02", "qwen-2", "qwen-10"]


def test_status_is_readable_by_the_router() -> None:
    members = (
        member("qwen-0", incarnation="6d1a57ee-0"),
        member("qwen-1", address="10.0.0.2", state=MemberState.JOINING, weight=25),
        member("qwen-2", address="fd00::3", state=MemberState.DRAINING),
    )
    document = {
        "apiVersion": "serving.dualmap.dev/v1alpha1",
        "kind": "InferencePool",
        "metadata": {"name": "qwen", "namespace": "llm"},
        "spec": {"model": {"name": "m"}},
        "status": status_document(PoolStatus(ring_version=7, members=members)),
    }
    (pool,) = read_pools(document)
    assert pool.ring_version == 7
    assert [(each.id, each.address, each.port, each.state, each.weight, each.incarnation) for each in pool.members] == [
        (each.id, each.address, each.port, each.state, each.weight, each.incarnation) for each in members
    ]


def test_status_is_valid_for_the_schema() -> None:
    """The status that a real API server stored (recorded/README.md) equals the status that the operator would write."""
    pool = json.loads((Path(__file__).parent / "recorded" / "inferencepool.json").read_text())
    status = read_status(pool["status"])
    assert status_document(status) == pool["status"]
    assert [(each.id, each.state) for each in status.members] == [
        ("qwen-0", MemberState.ACTIVE),
        ("qwen-1", MemberState.JOINING),
    ]
    assert all(each.incarnation for each in status.members)
    assert status.traffic == TrafficStatus(slo_attainment="0.97", cache_hit_rate="0.63")
    assert [each.type for each in status.conditions] == ["Accepted"]


@pytest.mark.parametrize(
    ("time_s", "text"),
    [
        (0.0, "1970-01-01T00:00:00Z"),
        (NOON_S + 0.999_999_5, "2026-11-22T12:00:00Z"),
        (NOON_S + 1, "2026-11-22T12:00:01Z"),
    ],
)
def test_status_times_are_written_in_kubernetes_format(time_s: float, text: str) -> None:
    assert time_text(time_s) == text


COUNTS = st.integers(0, 10_000)
WHOLE_SECONDS = st.integers(0, 4_000_000_000).map(float)
NAMES = st.text("abz019-.", min_size=1, max_size=8)
SHARES = st.sampled_from(["", "0.00", "0.63", "1.00"])
STATUSES = st.builds(
    PoolStatus,
    observed_generation=COUNTS,
    replicas=COUNTS,
    ready_replicas=COUNTS,
    in_ring=COUNTS,
    selector=st.text(max_size=10),
    ring_version=st.integers(0, 2**53),
    members=st.lists(
        st.builds(
            RingMember,
            id=NAMES,
            address=st.ip_addresses().map(str),
            port=st.integers(1, 65_535),
            state=st.sampled_from(MemberState),
            weight=st.integers(0, 1000),
            since_s=WHOLE_SECONDS,
            incarnation=st.text(max_size=5),
        ),
        max_size=5,
        unique_by=lambda member: member.id,
    ).map(tuple),
    traffic=st.builds(TrafficStatus, slo_attainment=SHARES, cache_hit_rate=SHARES),
    conditions=st.lists(
        st.builds(
            Condition,
            type=NAMES,
            status=st.sampled_from([True, False, None]),
            reason=st.text(max_size=5),
            message=st.text(max_size=5),
            since_s=WHOLE_SECONDS,
            observed_generation=COUNTS,
        ),
        max_size=3,
    ).map(tuple),
)


@given(status=STATUSES)
def test_status_round_trip_is_lossless(status: PoolStatus) -> None:
    read = read_status(status_document(status))
    assert set(read.members) == set(status.members)
    # The writer determines the order of members, so a second write changes nothing.
    assert read == read_status(status_document(read))
    assert read == PoolStatus(
        observed_generation=status.observed_generation,
        replicas=status.replicas,
        ready_replicas=status.ready_replicas,
        in_ring=status.in_ring,
        selector=status.selector,
        ring_version=status.ring_version,
        members=read.members,
        traffic=status.traffic,
        conditions=status.conditions,
    )
