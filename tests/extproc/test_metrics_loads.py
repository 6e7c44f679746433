"""Tests of the load gauges and the autoscaling signals at a scrape."""

from dataclasses import replace

import pytest

import builders
from dualmap.pools.pool import MemberState
from dualmap.requests import Reason, Rejection
from dualmap_extproc.errors import model_not_found, no_endpoint, refused_by_router
from extproc.metrics_pages import POOL, Counting, decision, everything, first_token, metrics, samples, status


class TestLoads:
    def test_load_gauges_show_the_current_statuses(self) -> None:
        made = metrics()
        got = samples(made, status(MemberState.ACTIVE, MemberState.DRAINING))
        at = f"endpoint=m-1,pool={POOL}"
        assert got[f"dualmap_endpoint_pending_prefill_tokens{{{at}}}"] == 2000
        assert got[f"dualmap_endpoint_in_flight_requests{{{at}}}"] == 2
        assert got[f"dualmap_endpoint_active_kv_tokens{{{at}}}"] == 5000
        assert got[f"dualmap_endpoint_prefill_tokens_per_second{{{at}}}"] == 6500.5
        assert got[f"dualmap_endpoint_solo_prefill_tokens_per_second{{{at}}}"] == 6600.0
        assert got[f"dualmap_endpoint_indexed_blocks{{{at}}}"] == 40
        assert got[f"dualmap_endpoint_weight{{{at}}}"] == 100
        assert got[f"dualmap_endpoint_held_requests{{{at}}}"] == 10
        assert got[f"dualmap_endpoint_held_prefill_tokens{{{at}}}"] == 700
        assert got[f"dualmap_endpoint_suspended{{{at}}}"] == 1
        assert got[f"dualmap_endpoint_suspended{{endpoint=m-0,pool={POOL}}}"] == 0
        assert got[f"dualmap_pool_held_requests{{pool={POOL}}}"] == 13
        assert got[f"dualmap_pool_sessions{{pool={POOL}}}"] == 21
        assert got[f"dualmap_pool_peers{{pool={POOL}}}"] == 3
        assert got[f"dualmap_ring_version{{pool={POOL}}}"] == 7
        assert got[f"dualmap_hotness_nodes{{pool={POOL}}}"] == 12
        assert got[f"dualmap_split_prefixes{{pool={POOL}}}"] == 2
        assert {state: got[f"dualmap_ring_members{{pool={POOL},state={state.value}}}"] for state in MemberState} == {
            MemberState.JOINING: 0,
            MemberState.ACTIVE: 1,
            MemberState.DRAINING: 1,
        }
        assert not [name for name in samples(made, status()) if name.startswith("dualmap_endpoint_")]

    def test_shadow_metrics_are_the_totals_of_each_policy(self) -> None:
        got = samples(metrics(), status())
        shown = {name: value for name, value in got.items() if name.startswith("dualmap_shadow_")}
        own, other = f"policy=dualmap,pool={POOL}", f"policy=ear,pool={POOL}"
        assert shown == {
            f"dualmap_shadow_decisions_total{{agreed=true,{own}}}": 9,
            f"dualmap_shadow_decisions_total{{agreed=false,{own}}}": 0,
            f"dualmap_shadow_decisions_total{{agreed=true,{other}}}": 5,
            f"dualmap_shadow_decisions_total{{agreed=false,{other}}}": 4,
            f"dualmap_shadow_predicted_ttft_seconds_sum{{{own}}}": 2.25,
            f"dualmap_shadow_predicted_ttft_seconds_count{{{own}}}": 9,
            f"dualmap_shadow_predicted_ttft_seconds_sum{{{other}}}": 2.5,
            f"dualmap_shadow_predicted_ttft_seconds_count{{{other}}}": 9,
            f"dualmap_shadow_predicted_cached_tokens_total{{{own}}}": 900,
            f"dualmap_shadow_predicted_cached_tokens_total{{{other}}}": 450,
        }


class TestSignals:
    """Tests of the input of the rule for desired replicas; tests/core/test_scaling.py tests the rule."""

    def told(self) -> tuple[Counting, list[float]]:
        """Return metrics, and a list with the metrics' current time."""
        clock = [1000.0]
        return Counting(clock=lambda: clock[0]), clock

    def shown(self, made: Counting, name: str, *states: MemberState) -> float:
        # No request is queued, because earlier queued requests also count as arrivals.
        return samples(made, replace(status(*states), held=0))[f"dualmap_pool_{name}{{pool={POOL}}}"]

    def test_scaling_signals_count_uncached_tokens_of_routed_prompts(self) -> None:
        made, clock = self.told()
        for _ in range(100):
            clock[0] += 1
            made.routed(POOL, decision())
        assert self.shown(made, "arriving_uncached_tokens_per_second") == pytest.approx(40, rel=0.02)
        clock[0] += 60
        assert self.shown(made, "arriving_uncached_tokens_per_second") == 0

    def test_scaling_signals_are_positive_after_a_no_endpoint_rejection(self) -> None:
        made, _ = self.told()
        idle, name = replace(status(), held=0), f"dualmap_pool_desired_replicas{{pool={POOL}}}"
        made.refused(replace(model_not_found("m"), pool=POOL))
        assert samples(made, idle)[name] == 0
        made.refused(no_endpoint(POOL))
        assert 0 < samples(made, idle)[name] < 1

    @pytest.mark.parametrize("reason", list(Reason))
    def test_scaling_signals_count_rejected_requests(self, reason: Reason) -> None:
        made, clock = self.told()
        for _ in range(100):
            clock[0] += 1
            made.routed(POOL, decision())
            made.refused(refused_by_router(POOL, Rejection(request_id="r", reason=reason)))
        assert self.shown(made, "arriving_uncached_tokens_per_second") == pytest.approx(80, rel=0.02)

    def test_scaling_signals_attainment_covers_one_minute(self) -> None:
        made, clock = self.told()
        name = f"dualmap_pool_slo_attainment{{pool={POOL}}}"
        assert name not in samples(made, status())
        for within_slo in (True, True, False):
            made.first_token(POOL, first_token(within_slo=within_slo))
        assert samples(made, status())[name] == 0.6667
        clock[0] += 60
        assert name not in samples(made, status())

    def test_scaling_signals_show_queued_work_of_remaining_members(self) -> None:
        made, _ = self.told()
        active = self.shown(made, "pending_prefill_tokens_per_endpoint", MemberState.ACTIVE, MemberState.ACTIVE)
        assert active == (1000 + 2000 + 700) / 2
        draining = self.shown(made, "pending_prefill_tokens_per_endpoint", MemberState.ACTIVE, MemberState.DRAINING)
        assert draining == 1000

    def test_scaling_signals_of_an_unknown_pool_are_absent(self) -> None:
        made, _ = self.told()
        made.set_pools([])
        everything(made)
        assert not made.signals([status()])

    def test_scaling_signals_are_kept_after_a_pool_change(self) -> None:
        made, clock = self.told()
        for _ in range(100):
            clock[0] += 1
            made.routed(POOL, decision())
        before = self.shown(made, "arriving_uncached_tokens_per_second")
        made.set_pools([builders.pool(3)])
        assert self.shown(made, "arriving_uncached_tokens_per_second") == before > 0
