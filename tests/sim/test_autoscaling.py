"""Tests of a simulated pool with an HPA: the controller and the instances with constructed inputs, then short complete
runs.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest

from dualmap.pools.pool import Engine, MemberState, Model, Pool, Prefix, Routing
from dualmap_extproc.store.exchange import INTERVAL_S
from dualmap_extproc.store.unsent import LOADS_INTERVAL_S
from dualmap_operator.decide import ring
from dualmap_sim.arrivals import Arrival, arrivals
from dualmap_sim.autoscaling.figures import Lag, figures, lag
from dualmap_sim.autoscaling.fleet import RAMP, Fleet
from dualmap_sim.autoscaling.hpa import Hpa, HpaSpec, Policy, Rules
from dualmap_sim.autoscaling.loop import Autoscaled, Run, run_autoscaled
from dualmap_sim.autoscaling.meters import OnQueue, OnSlo
from dualmap_sim.presets import PRESETS
from dualmap_sim.replication import ReplicationConfig
from dualmap_sim.workloads.pacing import Phase, paced, wave
from dualmap_sim.workloads.synthetic import default_workload
from dualmap_sim.workloads.trace import Trace, TraceRequest

ENGINE = PRESETS["7b"]
AT_ONCE = HpaSpec(
    min_replicas=1,
    max_replicas=10,
    up=Rules(stabilization_s=0, policies=(Policy(percent=900, period_s=15),)),
    down=Rules(stabilization_s=0, policies=(Policy(percent=100, period_s=15),)),
)


class TestHpa:
    def test_hpa_rounds_up_with_a_tolerance_of_10_percent(self) -> None:
        assert Hpa(AT_ONCE).sync(0, 4.2, requested=3, present=3) == 5
        assert Hpa(AT_ONCE).sync(0, 3.3, requested=3, present=3) == 3
        assert Hpa(AT_ONCE).sync(0, 2.7, requested=3, present=3) == 3
        assert Hpa(AT_ONCE).sync(0, 2.6, requested=4, present=4) == 3

    def test_hpa_stays_within_min_and_max_replicas(self) -> None:
        hpa = Hpa(AT_ONCE)
        assert hpa.sync(0, 99, requested=3, present=3) == 10
        assert hpa.sync(15, 0, requested=10, present=10) == 1

    def test_hpa_without_metric_keeps_replicas(self) -> None:
        hpa = Hpa(AT_ONCE)
        assert [hpa.sync(15 * n, None, requested=7, present=7) for n in range(100)] == [7] * 100

    def test_hpa_shrinks_to_largest_recommendation_of_its_window(self) -> None:
        hpa = Hpa(replace(AT_ONCE, down=replace(AT_ONCE.down, stabilization_s=60)))
        desired = [8, 8, 3, 5, 3, 3, 3, 3, 3]
        assert follow(hpa, desired, requested=8) == [8, 8, 8, 8, 8, 5, 5, 3, 3]

    def test_hpa_grows_by_its_most_permissive_policy(self) -> None:
        doubles_or_four = HpaSpec(min_replicas=1, max_replicas=40)
        assert follow(Hpa(doubles_or_four), [40] * 6, requested=2) == [6, 6, 6, 6, 12, 12]

    def test_hpa_shrinks_by_20_percent_or_1_pod_in_two_minutes(self) -> None:
        hasty = replace(HpaSpec(min_replicas=1), down=replace(HpaSpec().down, stabilization_s=0))
        assert follow(Hpa(hasty), [1] * 18, requested=10)[::4] == [8, 8, 6, 6, 4]

    def test_hpa_tolerance_includes_draining_pods(self) -> None:
        # Nine pods are present and eight are requested. 8.2 is within 10 % of nine, so Kubernetes then requests nine.
        assert Hpa(AT_ONCE).sync(0, 8.2, requested=8, present=9) == 9


def follow(hpa: Hpa, desired: Sequence[float], *, requested: int) -> list[int]:
    sizes = []
    for number, metric in enumerate(desired):
        requested = hpa.sync(15.0 * number, metric, requested=requested, present=requested)
        sizes.append(requested)
    return sizes


class TestFleet:
    def test_started_pod_joins_with_the_ring_weights_of_the_operator(self) -> None:
        fleet = Fleet(1, start_s=100)
        fleet.scale(0, 2)
        assert [member.id for member in fleet.members(99.9)] == ["qwen-0"]
        assert fleet.next_change_s(99.9) == 100
        weights = {at_s: fleet.members(at_s)[1].weight for at_s in (100, 105, 110, 120, 130)}
        assert weights == {100: 25, 105: 25, 110: 50, 120: 75, 130: 100}
        assert fleet.members(130)[1].state == MemberState.ACTIVE
        assert (*ring.RAMP, (ring.RAMP_S, ring.FULL_WEIGHT)) == RAMP

    def test_draining_pod_is_removed_after_two_idle_checks(self) -> None:
        fleet = Fleet(3, start_s=100)
        fleet.scale(0, 2)
        assert fleet.members(0)[2].state == MemberState.DRAINING
        fleet.check_idle(1, ["qwen-2"])
        fleet.check_idle(2, [])
        fleet.check_idle(3, ["qwen-2"])
        assert (fleet.present, fleet.serving) == (3, 2)
        fleet.check_idle(4, ["qwen-2"])
        assert (fleet.present, len(fleet.members(4)), fleet.pods[2].gone_s) == (2, 2, 4)

    def test_draining_pods_are_removed_together(self) -> None:
        fleet = Fleet(4, start_s=100)
        fleet.scale(0, 2)
        for at_s in (1, 2):
            fleet.check_idle(at_s, ["qwen-3"])
        assert (fleet.present, [member.id for member in fleet.members(2)]) == (4, ["qwen-0", "qwen-1", "qwen-2"])
        for at_s in (3, 4):
            fleet.check_idle(at_s, ["qwen-2", "qwen-3"])
        assert fleet.present == 2

    def test_draining_pod_becomes_active_again_with_its_cache(self) -> None:
        fleet = Fleet(2, start_s=100)
        fleet.scale(0, 1)
        fleet.scale(5, 2)
        (_, back) = fleet.members(5)
        assert (back.state, back.weight, len(fleet.pods)) == (MemberState.ACTIVE, 100, 2)

    def test_starting_pod_is_removed_at_once_on_scale_down(self) -> None:
        fleet = Fleet(1, start_s=100)
        fleet.scale(0, 3)
        fleet.scale(15, 1)
        assert (fleet.present, fleet.members(200), fleet.pods[2].gone_s) == (1, fleet.members(0), 15)


class TestPacing:
    def test_load_phase_has_its_rate_and_a_pause_has_no_requests(self) -> None:
        trace = ticks(100)
        phases = (Phase(seconds=10, rate=1), Phase(seconds=5, rate=0), Phase(seconds=10, rate=2))
        at_s = [request.arrival_s for request in paced(trace, phases).requests]
        assert at_s == [*range(10), *(15 + number / 2 for number in range(20))]

    def test_short_trace_repeats_with_different_prompts(self) -> None:
        again = paced(ticks(4), (Phase(seconds=10, rate=1),), start=2)
        assert [request.arrival_s for request in again.requests] == list(range(10))
        assert [request.blocks for request in again.requests[:4]] == [(2,), (3,), (4,), (5,)]
        assert len({request.blocks for request in again.requests}) == 10

    def test_load_wave_starts_and_ends_at_its_lowest_rate(self) -> None:
        rates = [phase.rate for phase in wave(period_s=960, low=1, high=3)]
        assert rates[0] == pytest.approx(1, abs=0.01)
        assert max(rates) == pytest.approx(3, abs=0.01)
        assert sum(rates) / len(rates) == pytest.approx(2)


def ticks(requests: int) -> Trace:
    """Return one request per second, each with its own prompt."""
    return Trace(
        name="ticks",
        block_tokens=512,
        requests=tuple(
            TraceRequest(arrival_s=float(n), blocks=(n,), input_tokens=512, output_tokens=8) for n in range(requests)
        ),
    )


PER_S = 3.0


def load(*phases: Phase) -> tuple[Arrival, ...]:
    """Return the default workload at PER_S times each phase's rate."""
    trace = paced(default_workload(2000).at_rate(PER_S).without_sessions(), phases)
    return arrivals(trace, router_block_tokens=trace.block_tokens, engine_block_tokens=ENGINE.block_tokens)


def scaled(asked: Sequence[Arrival], *, first: int, lasts_s: float) -> Run:
    return run_autoscaled(config(first=first, lasts_s=lasts_s), asked)


def config(*, first: int, lasts_s: float) -> Autoscaled:
    pool = Pool(
        namespace="tests",
        name="qwen",
        model=Model(name="qwen"),
        engine=Engine(prefill_tokens_per_second=ENGINE.prefill.tokens_per_s, kv_tokens=ENGINE.kv_memory_tokens),
        routing=Routing(prefix=Prefix(block_tokens=128)),
    )
    return Autoscaled(pool=pool, engine=ENGINE, first=first, lasts_s=lasts_s)


STEP_S = 300.0
STEP = (Phase(seconds=STEP_S, rate=1.0), Phase(seconds=300, rate=3.0), Phase(seconds=1800, rate=0.0))
ALL_S = 2400.0


@pytest.fixture(name="step", scope="module")
def _step() -> Run:
    """Return a run with load that triples and then ends; the pool begins with enough instances for the first load."""
    return scaled(load(*STEP), first=4, lasts_s=ALL_S)


def test_autoscaling_runs_with_equal_settings_are_equal(step: Run) -> None:
    again = scaled(load(*STEP), first=4, lasts_s=ALL_S)
    assert again == step


def test_load_step_scales_at_next_sync_and_serves_after_start() -> None:
    # The HPA has no stabilization window, so that the pool's size fits the load before the step.
    forgets = replace(HpaSpec(), down=AT_ONCE.down)
    run = run_autoscaled(replace(config(first=4, lasts_s=STEP_S + 150), hpa=forgets), load(*STEP[:2]))
    (before,) = (sync.requested for sync in run.syncs if sync.at_s == STEP_S)
    more = lag(run.syncs, since_s=STEP_S, enough=before + 1)
    # A sync at the moment of a start may count the new instance or not; the next sync counts it.
    assert more in (Lag(asked_s=15, serving_s=15 + 120), Lag(asked_s=15, serving_s=15 + 120 + 15))
    enough = lag(run.syncs, since_s=STEP_S, enough=2 * before)
    assert enough.asked_s is not None
    assert enough.asked_s <= 60


def test_pool_without_load_shrinks_to_minimum_without_aborts(step: Run) -> None:
    assert step.syncs[-1].present == 2
    after = [sync.requested for sync in step.syncs if sync.at_s > 600]
    assert all(later <= earlier for earlier, later in pairwise(after))
    assert all(record.finished_s is not None or record.refused is not None for record in step.records)
    assert sum(pod.gone_s is not None for pod in step.pods) > 2
    assert figures(step, slo_ttft_s=5.0, warmup_s=0).cut == 0


def test_autoscaling_costs_less_than_a_fixed_fleet_for_peak_load(step: Run) -> None:
    found = figures(step, slo_ttft_s=5.0, warmup_s=0)
    assert found.instance_hours < 0.8 * found.replicas_max * ALL_S / 3600


def test_pod_removed_before_its_requests_end_is_detected(step: Run) -> None:
    gone = replace(step, pods=tuple(replace(pod, gone_s=100.0) for pod in step.pods))
    assert figures(gone, slo_ttft_s=5.0, warmup_s=0).cut > 0


def test_steady_load_keeps_the_fleet_size() -> None:
    run = scaled(load(Phase(seconds=2400, rate=1.0)), first=4, lasts_s=2400)
    found = figures(run, slo_ttft_s=5.0, warmup_s=600)
    assert found.turns <= 2
    assert max(sync.requested for sync in run.syncs) - min(sync.requested for sync in run.syncs) <= 2
    assert found.summary.slo_attainment > 0.98


def test_missing_hpa_metric_changes_no_replicas() -> None:
    blind = replace(config(first=4, lasts_s=1500), blind_s=(200.0, 1500.0))
    run = run_autoscaled(blind, load(Phase(seconds=300, rate=1.0)))
    assert {sync.requested for sync in run.syncs if sync.at_s > 200} == {run.syncs[12].requested}
    seeing = run_autoscaled(replace(blind, blind_s=(1e9, 1e9)), load(Phase(seconds=300, rate=1.0)))
    assert seeing.syncs[-1].requested < run.syncs[-1].requested


def test_fixed_fleet_keeps_its_size() -> None:
    run = run_autoscaled(replace(config(first=3, lasts_s=600), scaler=None), load(Phase(seconds=300, rate=1.0)))
    assert {sync.requested for sync in run.syncs} == {3}
    assert figures(run, slo_ttft_s=5.0, warmup_s=0).instance_hours == pytest.approx(3 * 600 / 3600, rel=0.01)


def test_doubled_queue_target_halves_desired_replicas() -> None:
    asked = load(Phase(seconds=120, rate=1.0))
    desired = {}
    for target in (4.0, 8.0):
        fixed = HpaSpec(min_replicas=8, max_replicas=8)
        queue = replace(config(first=8, lasts_s=120), scaler=OnQueue(requests=target), hpa=fixed)
        desired[target] = [sync.desired for sync in run_autoscaled(queue, asked).syncs]
    assert all(
        few and many and few == pytest.approx(2 * many) for few, many in zip(desired[4.0], desired[8.0], strict=True)
    )


@pytest.mark.parametrize("hop_delay_s", [0.001, None])
def test_four_routers_desire_as_many_replicas_as_one_router(hop_delay_s: float | None) -> None:
    asked = load(Phase(seconds=300, rate=1.5))
    fixed = replace(
        config(first=3, lasts_s=300),
        scaler=OnSlo(),
        hpa=HpaSpec(min_replicas=3, max_replicas=3),
        hop_delay_s=hop_delay_s,
        exchange=ReplicationConfig(period_s=LOADS_INTERVAL_S, delay_s=INTERVAL_S / 2),
    )
    engine = replace(fixed.pool.engine, prefill_tokens_per_second=3 * ENGINE.prefill.tokens_per_s)
    fixed = replace(fixed, pool=replace(fixed.pool, engine=engine))
    alone, four = (run_autoscaled(replace(fixed, routers=routers), asked) for routers in (1, 4))
    assert {record.router for record in four.records} == {0, 1, 2, 3}
    desired = [[sync.desired or 0.0 for sync in run.syncs if 60 < sync.at_s < 300] for run in (alone, four)]
    assert sum(desired[1]) == pytest.approx(sum(desired[0]), rel=0.15)
