"""Members that must stop during a run: what routers know, and what the requests lose."""

from dataclasses import replace

import pytest

from builders import chain
from dualmap.pools.pool import MemberState
from dualmap_sim.arrivals import Arrival
from dualmap_sim.engine import EngineRequest
from dualmap_sim.events import Event, Fail, Forget, PoolChange
from dualmap_sim.experiment import Experiment, pool_of, run_experiment
from dualmap_sim.notices import Notice, Reaction, losses, recomputed_tokens
from dualmap_sim.records import Record
from dualmap_sim.workloads.catalog import Workload

BASE = Experiment(
    workload=Workload(name="default", requests=240), requests_per_s=4.0, instances=4, warmup=0, sample_s=None
)
NOTICE = Notice(at_s=20.0, notice_s=20.0, members=frozenset({"qwen-1"}))


@pytest.mark.parametrize("reaction", Reaction)
def test_notice_ends_its_members_at_the_same_time(reaction: Reaction) -> None:
    events = NOTICE.events(pool_of(BASE), reaction)
    fail, end = events[-2:]
    assert fail == Fail(at_s=40.0, member="qwen-1")
    assert isinstance(end, PoolChange)
    assert [each.id for each in end.pool.members] == ["qwen-0", "qwen-2", "qwen-3"]
    told = [each for each in events[:-2] if isinstance(each, PoolChange)]
    states = [(each.at_s, each.pool.members[1].state, each.pool.members[1].leave_at_s) for each in told]
    assert (
        states
        == {
            Reaction.NOTHING: [],
            Reaction.DRAIN: [(20.0, MemberState.DRAINING, None)],
            Reaction.NOTICE: [(20.0, MemberState.DRAINING, 40.0)],
        }[reaction]
    )


def members_of(events: tuple[Event, ...]) -> list[tuple[float, list[str]]]:
    """Return each change of the pool with its members; those that drain have a minus."""
    return [
        (
            event.at_s,
            [f"-{each.id}" if each.state is MemberState.DRAINING else each.id for each in event.pool.members],
        )
        for event in events
        if isinstance(event, PoolChange)
    ]


def test_notice_among_other_changes_keeps_them() -> None:
    three, four = (pool_of(replace(BASE, instances=number)) for number in (3, 4))
    among = (
        PoolChange(at_s=10.0, pool=three),
        Forget(at_s=15.0, member="qwen-1"),
        PoolChange(at_s=30.0, pool=four),
        Forget(at_s=50.0, member="qwen-1"),
        PoolChange(at_s=60.0, pool=three),
    )
    events = NOTICE.events(four, Reaction.NOTICE, among=among)
    assert members_of(events) == [
        (10.0, ["qwen-0", "qwen-1", "qwen-2"]),
        (20.0, ["qwen-0", "-qwen-1", "qwen-2"]),
        (30.0, ["qwen-0", "-qwen-1", "qwen-2", "qwen-3"]),
        (40.0, ["qwen-0", "qwen-2", "qwen-3"]),
        (60.0, ["qwen-0", "qwen-2"]),
    ]
    # The engine that stopped has no cache to forget.
    assert [each for each in events if not isinstance(each, PoolChange)] == [among[1], Fail(at_s=40.0, member="qwen-1")]


def test_member_that_was_removed_before_its_end_does_not_fail() -> None:
    four = pool_of(BASE)
    without = replace(four, members=four.members[2:])
    events = NOTICE.events(four, Reaction.NOTICE, among=(PoolChange(at_s=35.0, pool=without),))
    assert not any(isinstance(each, Fail) for each in events)


def test_several_notices_end_all_their_members() -> None:
    pool = pool_of(BASE)
    at_once = Notice(at_s=40.0, notice_s=0.0, members=frozenset({"qwen-0"}))
    events = at_once.events(pool, Reaction.NOTICE, among=NOTICE.events(pool, Reaction.NOTICE))
    assert sorted(each.member for each in events if isinstance(each, Fail)) == ["qwen-0", "qwen-1"]
    assert members_of(events)[-1] == (40.0, ["qwen-2", "qwen-3"])
    assert isinstance(events[1], Fail), "a member fails before it is removed"
    records = run_experiment(replace(BASE, events=events)).records
    assert losses(records, from_s=40.0, block_tokens=16).failed > 0


def failed(reaction: Reaction) -> tuple[int, int]:
    """Return the failed requests, and those that a member with notice got although it leaves."""
    records = run_experiment(replace(BASE, events=NOTICE.events(pool_of(BASE), reaction))).records
    return sum(each.failed for each in records), sum(each.rule == "leaving-warm" for each in records)


def test_requests_fail_only_without_a_notice() -> None:
    assert failed(Reaction.NOTHING)[0] > 0
    assert failed(Reaction.NOTICE)[0] <= failed(Reaction.DRAIN)[0]


def record(id: str, blocks: tuple[int, ...], *, at_s: float, cached_tokens: int = 0) -> Record:
    work = EngineRequest(request_id=id, prompt_tokens=16 * len(blocks), output_tokens=1, blocks=blocks)
    arrival = Arrival(at_s=at_s, session=None, work=work, chain=chain(id))
    return Record(arrival=arrival, router=0, prefilled_s=at_s + 1, cached_tokens=cached_tokens)


def test_recomputed_tokens_were_computed_before_and_are_not_cached() -> None:
    records = (
        record("a", (1, 2, 3), at_s=0.0),
        record("b", (1, 2, 3, 4), at_s=10.0, cached_tokens=16),
        record("c", (1, 2, 9), at_s=20.0, cached_tokens=32),
        record("d", (5, 1), at_s=30.0),
    )
    assert recomputed_tokens(records, from_s=5.0, block_tokens=16) == 32
    assert recomputed_tokens(records, from_s=15.0, block_tokens=16) == 0


def test_streams_without_a_notice_continue_on_another_engine() -> None:
    events = NOTICE.events(pool_of(BASE), Reaction.NOTHING)
    cut = run_experiment(replace(BASE, events=events)).records
    records = run_experiment(replace(BASE, events=events, continues=True)).records

    began = {each.arrival.request_id for each in cut if each.failed and each.first_token_s is not None}
    continued = {each.arrival.request_id: each for each in records if each.continued}
    assert began
    assert began == continued.keys()
    assert not any(each.failed and each.first_token_s is not None for each in records)
    for each in continued.values():
        work = each.arrival.work
        # The other engine caches nothing of the answer, and stops where the first engine would have stopped.
        assert 0 < each.recomputed_tokens < work.prompt_tokens + work.output_tokens
        assert each.stall_s > 0
        assert each.finished_s is not None


def test_stream_whose_other_engine_fails_too_is_cut() -> None:
    everybody = replace(NOTICE, members=frozenset({"qwen-0", "qwen-1", "qwen-2", "qwen-3"}))
    events = everybody.events(pool_of(BASE), Reaction.NOTHING)[:-1]
    records = run_experiment(replace(BASE, events=events, continues=True)).records

    assert any(each.continued for each in records)
    assert all(each.failed for each in records if each.continued)


def test_recomputed_tokens_include_those_of_continued_streams() -> None:
    stream = replace(record("a", (1, 2, 3), at_s=0.0), continued=True, recomputed_tokens=40)
    assert recomputed_tokens((stream,), from_s=5.0, block_tokens=16) == 40
