"""Tests of several simulated routers whose pool's owner decides for all of them."""

from dataclasses import replace

import pytest

from clusters import assert_books_empty, busy_config, busy_requests, config, one_block_prompts, small_pool
from dualmap.pools.pool import Queue
from dualmap.shared_router import SharedRouter
from dualmap_extproc.peers.link import HEARTBEAT_S, SILENT_BEATS
from dualmap_sim.cluster import Cluster, Replica
from dualmap_sim.experiment import Experiment, run_experiment
from dualmap_sim.messages import LATE_S, LOSS_NOTICED_S, owner_number
from dualmap_sim.workloads.catalog import Workload

FAR_S = 0.001
OWNER = owner_number(small_pool(2), 2)


def two(**replicas: Replica) -> tuple[Replica, ...]:
    """Return two routers, of which ``owner`` or ``other`` differs from a router that always runs."""
    routers = [Replica(), Replica()]
    for name, replica in replicas.items():
        routers[OWNER if name == "owner" else 1 - OWNER] = replica
    return tuple(routers)


def owners_of(cluster: Cluster) -> list[str]:
    return [router.owner for router in cluster.routers if isinstance(router, SharedRouter)]


def test_four_routers_with_an_owner_attain_as_much_as_one() -> None:
    one = Experiment(workload=Workload(requests=1000), requests_per_s=8.0, warmup=200, sessions=False, sample_s=None)
    four = replace(one, routers=4)
    alone, owner, local = (
        run_experiment(each).summary for each in (one, four, replace(four, owner_decides=False, view_delay_s=2.0))
    )
    assert owner.slo_attainment == pytest.approx(alone.slo_attainment, abs=0.01)
    assert owner.hit_rate == pytest.approx(alone.hit_rate, abs=0.01)
    assert abs(local.hit_rate - alone.hit_rate) > abs(owner.hit_rate - alone.hit_rate)


def test_late_answers_delay_no_request_beyond_the_wait_for_them() -> None:
    late = replace(busy_config(3, Queue()), hop_delay_s=FAR_S, late_hops=1.0, lasts_s=600)
    cluster = Cluster(late)
    records = cluster.run(busy_requests())
    others = [each for each in records if each.router != owner_number(late.pool, 3) and not each.held]
    assert {each.dispatched_s is None or each.dispatched_s - each.arrival.at_s < LATE_S for each in others} == {True}
    assert_books_empty(cluster)


def test_router_that_starts_late_becomes_the_owner() -> None:
    started = replace(
        config(small_pool(2), routers=2), replicas=two(owner=Replica(at_s=5.0)), hop_delay_s=FAR_S, lasts_s=60
    )
    cluster = Cluster(started)
    records = cluster.run(one_block_prompts(*(0.5 * n for n in range(40))))
    assert {each.router for each in records if each.arrival.at_s < 5.0} == {1 - OWNER}
    assert owners_of(cluster) == [f"router-{OWNER}"] * 2
    assert {each.router for each in records} == {0, 1}
    assert all(each.finished_s is not None for each in records)
    assert_books_empty(cluster)


@pytest.mark.parametrize("lost", ["owner", "other"])
def test_requests_continue_after_a_router_is_lost(lost: str) -> None:
    losing = replace(
        config(small_pool(2), routers=2), replicas=two(**{lost: Replica(lost_s=5.2)}), hop_delay_s=FAR_S, lasts_s=60
    )
    cluster = Cluster(losing)
    records = cluster.run(one_block_prompts(*(1.0 * n for n in range(20))))
    left = 1 - OWNER if lost == "owner" else OWNER
    assert {each.router for each in records if each.arrival.at_s > 5.2} == {left}
    assert all(each.finished_s is not None for each in records)
    router = cluster.routers[left]
    assert isinstance(router, SharedRouter)
    assert router.owner == f"router-{left}"
    assert [each.in_flight for each in router.status().endpoints] == [0, 0]


def test_requests_queued_at_a_lost_router_fail() -> None:
    queue = Queue(dispatch_window_s=0.1)
    losing = replace(
        config(small_pool(1, queue=queue), routers=2), replicas=two(owner=Replica(lost_s=1.0)), hop_delay_s=FAR_S
    )
    cluster = Cluster(losing)
    records = cluster.run(one_block_prompts(*(0.01 * n for n in range(20))))
    failed = [each for each in records if each.failed]
    assert {each.router for each in failed} == {OWNER}
    assert all(each.finished_s is not None for each in records if not each.failed)


def test_loss_is_noticed_as_late_as_in_production() -> None:
    assert LOSS_NOTICED_S == HEARTBEAT_S * SILENT_BEATS
