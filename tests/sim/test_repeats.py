"""Tests of repeated changes of a recorded pool: their times, members, settings, and what is not repeated."""

from dataclasses import replace
from pathlib import Path

import pytest

from dualmap.pools.kv_store import KvStore, StoreType
from dualmap.pools.pool import Member, MemberState, Pool, Routing
from dualmap.recordings.values import Line, PoolChanged, PoolRemoved
from dualmap_sim.events import Forget, PoolChange
from dualmap_sim.experiment import Experiment
from dualmap_sim.recordings.replays import Traffic, read_traffic
from dualmap_sim.repeats import with_changes
from dualmap_sim.workloads.catalog import Workload
from recorded import HEADER, POOL, START_S, request, write

A, B, C = (Member(id=name, address=f"10.0.0.{number}", port=8000) for number, name in enumerate("abc"))


def version(after_s: float, *members: Member, pool: Pool = POOL) -> PoolChanged:
    return PoolChanged(at_s=START_S + after_s, pool=replace(pool, members=members))


def read(path: Path, *lines: Line) -> tuple[Traffic, Experiment]:
    """Return the traffic of 11 requests in 10 s beside ``lines``, and an experiment at its rate."""
    file = write(path / "requests.jsonl", *lines, *(request(float(number)) for number in range(11)))
    workload = Workload(recording=file, requests=100)
    return read_traffic(file), Experiment(requests_per_s=1.1, workload=workload, warmup=0)


def changes(experiment: Experiment) -> list[tuple[float, list[str]]]:
    return [
        (round(event.at_s, 6), [member.id for member in event.pool.members])
        for event in experiment.events
        if isinstance(event, PoolChange)
    ]


def test_members_join_and_leave_at_their_times(tmp_path: Path) -> None:
    traffic, experiment = read(tmp_path, version(-5.0, A), version(2.5, A, B), version(6.0, B, C), version(11.0, C))
    repeated = with_changes(experiment, traffic)
    assert repeated.members == (A,)
    # The last change is later than the last request.
    assert changes(repeated) == [(2.5, ["a", "b"]), (6.0, ["b", "c"])]
    assert traffic.members == ("a", "b", "c")
    assert traffic.unrepeated_between(traffic.requests[0], traffic.requests[-1]) == ()


def test_changes_keep_their_place_at_another_rate(tmp_path: Path) -> None:
    leaving = replace(A, state=MemberState.DRAINING, leave_at_s=START_S + 8.0)
    traffic, experiment = read(tmp_path, version(0.0, A, B), version(4.0, leaving, B))
    repeated = with_changes(replace(experiment, requests_per_s=2.2), traffic)
    assert changes(repeated) == [(2.0, ["a", "b"])]
    (event,) = repeated.events
    assert isinstance(event, PoolChange)
    assert event.pool.members[0].leave_at_s == pytest.approx(4.0)


def test_window_begins_with_the_members_of_its_time(tmp_path: Path) -> None:
    traffic, experiment = read(tmp_path, version(0.0, A), version(2.5, A, B), version(6.5, B))
    window = replace(experiment, workload=replace(experiment.workload, start=5, requests=3), requests_per_s=1.5)
    repeated = with_changes(window, traffic)
    assert repeated.members == (A, B)
    assert changes(repeated) == [(1.5, ["b"])]


def test_idle_days_move_changes_with_the_requests(tmp_path: Path) -> None:
    day_s = 86_400.0
    file = write(
        tmp_path / "requests.jsonl", version(0.0, A), version(day_s / 2, A, B), version(day_s + 1, A, B, C),
        request(0.0), request(day_s), request(day_s + 2),
    )  # fmt: skip
    traffic = read_traffic(file)
    experiment = Experiment(requests_per_s=3 / 3602.0, workload=Workload(recording=file, requests=9), warmup=0)
    assert changes(with_changes(experiment, traffic)) == [(3600.0, ["a", "b"]), (3601.0, ["a", "b", "c"])]


def test_settings_change_only_if_they_are_asked_for(tmp_path: Path) -> None:
    other = replace(POOL, routing=Routing(policy="round_robin"))
    traffic, experiment = read(tmp_path, version(0.0, A), version(3.0, A, pool=other))
    assert with_changes(experiment, traffic).events == ()
    repeated = with_changes(
        experiment, traffic, lambda own, pool: replace(own, policy=pool.routing.policy, routing=pool.routing)
    )
    (event,) = repeated.events
    assert isinstance(event, PoolChange)
    assert (event.at_s, event.pool.routing.policy, repeated.policy) == (3.0, "round_robin", "dualmap")


def test_engine_that_restarted_at_its_address_loses_its_cache(tmp_path: Path) -> None:
    old, new = replace(A, incarnation="1"), replace(A, incarnation="2")
    moved = replace(B, incarnation="2", address="10.0.0.9")
    traffic, experiment = read(tmp_path, version(0.0, old, replace(B, incarnation="1")), version(3.0, new, moved))
    events = with_changes(experiment, traffic).events
    assert [type(event) for event in events] == [PoolChange, Forget]
    assert events[1] == Forget(at_s=3.0, member="a")


def test_old_version_of_a_second_router_is_no_change(tmp_path: Path) -> None:
    newer = replace(POOL, ring_version=2)
    lines = (version(0.0, A), version(3.0, A, B, pool=newer), version(3.2, A), version(3.5, A, B, pool=newer))
    one, _ = read(tmp_path / "one", *lines)
    assert len(one.versions) == 4
    requests = [request(float(number)) for number in range(11)]
    header = HEADER._replace(router="router-a,router-b")
    both = read_traffic(write(tmp_path / "both.jsonl", *lines, *requests, header=header))
    assert [len(each.pool.members) for each in both.versions] == [1, 2]


def test_changes_that_no_simulation_repeats_are_named_with_their_times(tmp_path: Path) -> None:
    stored = replace(POOL, kv_store=KvStore(type=StoreType.MOONCAKE))
    longer = replace(POOL, routing=replace(POOL.routing, prefix=replace(POOL.routing.prefix, block_tokens=256)))
    traffic, _ = read(
        tmp_path,
        version(-1.0, A),
        version(2.0, A, pool=stored),
        PoolRemoved(at_s=START_S + 4.0, pool=POOL.id),
        version(5.0, A, pool=stored),
        version(7.0, A, pool=longer),
        PoolRemoved(at_s=START_S + 20.0, pool=POOL.id),
    )
    found = traffic.unrepeated_between(traffic.requests[0], traffic.requests[-1])
    assert [(each.what, each.recorded_s - START_S) for each in found] == [
        ("spec.kvStore changed", 2.0),
        ("the pool was removed", 4.0),
        ("spec.kvStore changed", 7.0),
        ("spec.routing.prefix.blockTokens changed", 7.0),
    ]
    assert traffic.unrepeated_between(traffic.requests[5], traffic.requests[6]) == ()


def test_changes_of_a_pool_with_a_prefill_pool_are_not_repeated(tmp_path: Path) -> None:
    decode = replace(POOL, prefill_pool="prefill")
    prefill = replace(POOL, name="prefill")
    traffic, _ = read(
        tmp_path,
        version(0.0, A, pool=decode),
        version(0.0, B, pool=prefill),
        version(3.0, A, C, pool=decode),
        version(5.0, B, C, pool=prefill),
    )
    found = traffic.unrepeated_between(traffic.requests[0], traffic.requests[-1])
    assert [each.what for each in found] == ["the pool changed, which has a prefill pool", "the prefill pool changed"]
    assert traffic.prefillers == 2
