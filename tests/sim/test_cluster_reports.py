"""Tests of late and lost reports to routers, of closed loops, and of identical results."""

from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256

import pytest

from clusters import (
    SEVEN_B,
    assert_books_empty,
    assert_each_ended_once,
    busy_config,
    busy_requests,
    config,
    one_block_prompts,
    small_pool,
)
from dualmap.engines.profile import read_metrics
from dualmap.fleet.ledger import IN_FLIGHT_TTL_S
from dualmap.pools.pool import Queue
from dualmap_sim.arrivals import Arrival, arrivals
from dualmap_sim.cluster import Cluster, ClusterConfig, Record
from dualmap_sim.discovery import profile_of
from dualmap_sim.engine import Engine, EngineRequest
from dualmap_sim.events import Fail, Recover
from dualmap_sim.metrics import EngineMetrics
from dualmap_sim.summary import summarise
from dualmap_sim.workloads.synthetic import default_workload


def in_flight(cluster: Cluster) -> int:
    return sum(endpoint.in_flight for router in cluster.routers for endpoint in router.status().endpoints)


def test_lost_reports_match_the_configured_share_and_expire() -> None:
    asked = busy_requests(rate=8.0)
    cluster = Cluster(replace(busy_config(1), report_loss=0.1))
    records = cluster.run(asked)
    assert_each_ended_once(asked, records)
    assert all(record.finished_s is not None for record in records)
    assert 10 <= in_flight(cluster) <= 30
    last_s = max(record.finished_s for record in records if record.finished_s is not None)
    (router,) = cluster.routers
    router.on_deadline(last_s)
    assert in_flight(cluster) > 0
    router.on_deadline(last_s + IN_FLIGHT_TTL_S + 1.0)
    assert_books_empty(cluster)


@pytest.mark.parametrize("kv_tokens", [None, SEVEN_B.kv_memory_tokens])
def test_lost_reports_suspend_no_member(kv_tokens: int | None) -> None:
    """If only the TTL removes lost requests from the load, attainment is 10 and 14 percentage points lower."""
    asked, of = busy_requests(900, rate=10.0), busy_config(1, Queue())
    of = replace(of, pool=replace(of.pool, engine=replace(of.pool.engine, kv_tokens=kv_tokens)))
    runs = [Cluster(replace(of, report_loss=loss)).run(asked) for loss in (0.0, 0.05)]
    complete, lossy = (summarise(records, slo_ttft_s=5.0).slo_attainment for records in runs)
    assert lossy > complete - 0.03


def test_router_without_completion_expires_request_by_ttl() -> None:
    cluster = Cluster(replace(config(small_pool(1)), report_loss=1.0))
    records = cluster.run(one_block_prompts(0.0, 100.0, IN_FLIGHT_TTL_S + 50.0))
    assert [record.finished_s is not None for record in records] == [True] * 3
    # The first request has expired at the third request's arrival.
    assert in_flight(cluster) == 2
    cluster.routers[0].on_deadline(2 * IN_FLIGHT_TTL_S + 50.0)
    assert_books_empty(cluster)


def test_late_report_of_failed_request_is_ignored() -> None:
    events = (Fail(at_s=1.6, member="m-0"), Recover(at_s=2.0, member="m-0"))
    late = replace(config(small_pool(1), events=events), feedback_delay_s=0.5)
    cluster = Cluster(late)
    first, second = cluster.run(one_block_prompts(0.0, 3.0))
    assert (first.first_token_s, first.failed) == (1.5, True)
    assert second.ttft_s == 1.5
    assert_books_empty(cluster)


def test_delayed_replication_serves_all_requests_at_lower_attainment() -> None:
    asked = busy_requests(400, rate=10.0)
    fresh, stale = (busy_config(4, policy="least_loaded") for _ in range(2))
    assert stale.exchange is not None
    stale = replace(stale, exchange=replace(stale.exchange, period_s=2.0, delay_s=1.0))
    runs = [Cluster(of).run(asked) for of in (fresh, stale)]
    for records in runs:
        assert_each_ended_once(asked, records)
        assert {record.router for record in records} == {0, 1, 2, 3}
    p90_s = [summarise(records, slo_ttft_s=5.0).ttft_p90_s for records in runs]
    assert p90_s[0] < p90_s[1]


def closed(requests: int, *, rate: float) -> tuple[Arrival, ...]:
    """Return the default workload as a closed loop: each turn starts 2 s after its session's previous turn."""
    trace = default_workload(requests, seed=3).at_rate(rate)
    paused = tuple(replace(request, pause_s=2.0) for request in trace.requests)
    looped = replace(trace, requests=paused, closed_loop=True)
    return arrivals(looped, router_block_tokens=128, engine_block_tokens=512)


def makespan_s(asked: Sequence[Arrival], members: int) -> float:
    records = Cluster(busy_config(1, Queue(max_wait_s=1000.0), members=members)).run(asked)
    assert_each_ended_once(asked, records)
    return max(record.finished_s for record in records if record.finished_s is not None)


def test_next_turn_arrives_exactly_a_pause_after_previous_turn() -> None:
    asked = closed(300, rate=6.0)
    cluster = Cluster(busy_config(1, Queue()))
    records = cluster.run(asked)
    assert_each_ended_once(asked, records)
    by_id = {record.arrival.request_id: record for record in records}
    following = [record for record in records if record.arrival.follows is not None]
    assert len(following) > 100
    for record in following:
        assert record.arrival.follows is not None
        before = by_id[record.arrival.follows]
        assert before.finished_s is not None
        assert record.arrival.at_s == before.finished_s + 2.0
    arrived_s = [record.arrival.at_s for record in records]
    assert arrived_s == sorted(arrived_s)
    assert_books_empty(cluster)


def test_session_continues_after_a_rejected_turn() -> None:
    queue = Queue(dispatch_window_s=0.1, max_held=1)
    zeroth, first, second, third = one_block_prompts(0.0, 0.1, 0.2, 0.2)
    asked = (zeroth, first, second, replace(third, follows="2", pause_s=10.0))
    records = Cluster(config(small_pool(1, queue=queue))).run(asked)
    assert records[2].refused is not None
    assert records[3].arrival.at_s == 0.2 + 10.0
    assert records[3].ttft_s == 1.5


def test_turn_after_an_unknown_request_is_an_error() -> None:
    first, second = one_block_prompts(0.0, 1.0)
    with pytest.raises(AssertionError, match="follows one that never came"):
        Cluster(config(small_pool(1))).run((first, replace(second, follows="7")))


def test_closed_loop_run_lasts_longer_under_load() -> None:
    """With fewer engines, sessions take longer. In an open loop, the arrival times would not change."""
    asked = closed(300, rate=20.0)
    spans_s = [makespan_s(asked, members) for members in (8, 3, 2)]
    assert spans_s == sorted(spans_s)
    assert spans_s[2] > 1.3 * spans_s[0]


def digest(records: Sequence[Record]) -> str:
    """Return the digest of all records of a run, with exact floats (repr)."""
    lines = [
        repr(
            (
                record.arrival.request_id,
                record.arrival.at_s,
                record.router,
                record.held,
                record.dispatched_s,
                record.endpoint,
                record.rule,
                record.cached_tokens,
                record.first_token_s,
                record.finished_s,
                record.refused and record.refused.value,
                record.failed,
            )
        )
        for record in records
    ]
    return sha256("\n".join(lines).encode()).hexdigest()[:16]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [("round_robin", "70f699289af6520a"), ("min_ttft", "22a076cc3d024763"), ("preble", "4699c3151ad8fab6")],
)
def test_cluster_run_is_fixed_by_its_seed_on_any_machine(policy: str, expected: str) -> None:
    """A different digest means that this code no longer reproduces published results. Say why."""
    of = replace(
        busy_config(3, Queue(dispatch_window_s=0.5), policy=policy),
        events=(Fail(at_s=5.0, member="m-1"), Recover(at_s=8.0, member="m-1")),
        report_loss=0.02,
    )
    assert digest(Cluster(of).run(closed(200, rate=10.0))) == expected


def test_discovered_profile_equals_the_one_read_from_the_metrics_page() -> None:
    engine = Engine(replace(SEVEN_B, cache_tokens=100_352))
    for number in range(3):
        engine.submit(0.0, EngineRequest(request_id=str(number), prompt_tokens=2000, output_tokens=50, blocks=()))
    engine.advance(0.5)
    found = profile_of(engine, 0.5)
    assert found.kv_tokens == found.cache_tokens == 99_840
    assert (found.waiting, found.running) == (1, 2)
    page = EngineMetrics(engine, model="qwen", speed=1.0).render()
    assert replace(read_metrics("vLLM", page, at_s=0.5), started_s=None) == found


def test_discovery_gives_routers_the_memory_of_the_engines() -> None:
    asked, of = busy_requests(400, rate=14.0), busy_config(1, Queue())
    small = replace(of, engine=replace(SEVEN_B, kv_memory_tokens=60_000))
    assert of.pool.engine.kv_tokens is None

    def waits_in_engines(config: ClusterConfig) -> int:
        records = Cluster(config).run(asked)
        assert_each_ended_once(asked, records)
        return sum(
            record.first_token_s - record.dispatched_s > 2.0
            for record in records
            if record.first_token_s is not None and record.dispatched_s is not None
        )

    stated = replace(small.pool, engine=replace(small.pool.engine, kv_tokens=60_000))
    unknown, discovered = waits_in_engines(small), waits_in_engines(replace(small, discovery=True))
    assert discovered < unknown / 4
    assert waits_in_engines(replace(small, pool=stated)) < unknown / 4


def test_discovered_members_that_fail_and_recover_lose_no_request() -> None:
    asked, of = busy_requests(200, rate=8.0), busy_config(2, Queue())
    of = replace(of, discovery=True, events=(Fail(at_s=5.0, member="m-0"), Recover(at_s=9.0, member="m-0")))
    cluster = Cluster(of)
    assert_each_ended_once(asked, cluster.run(asked))
    assert_books_empty(cluster)
    assert cluster.routers[0].pool.engine.cache_tokens == SEVEN_B.cache_tokens // 512 * 512 - 512
