"""Tests of a pool's demand as the sum of all routers' reports, also after a router has stopped."""

from dataclasses import replace

import pytest

import builders
from dualmap.pools.pool import MemberState, Pool
from dualmap.replicas.peers import PEER_TTL_S
from dualmap.requests import PoolSnapshot
from dualmap.router import PoolRouter
from dualmap.scaling.reports import NO_SHARE, REMEMBERED_S, PeerShares, Report, Share, share_of
from dualmap.scaling.scaling import Scaling

OWN = Share(desired_replicas=1.5, pending_prefill_tokens=100, in_flight=3, held=1, first_tokens=10, slo_met=9)
OTHER = Share(desired_replicas=2.25, pending_prefill_tokens=50, in_flight=4, held=0, first_tokens=30, slo_met=15)
SUM = Share(desired_replicas=3.75, pending_prefill_tokens=150, in_flight=7, held=1, first_tokens=40, slo_met=24)


def report(own: Share, pool: Share | None = None) -> Report:
    return Report(own=own, pool=pool or own)


class TestSums:
    def test_demand_shares_add_up_with_weighted_attainment(self) -> None:
        peers = PeerShares()
        peers.add_report(0.0, "other", report(OTHER))
        assert peers.total(1.0, OWN) == SUM
        assert peers.total(1.0, OWN).slo_attainment == 24 / 40

    def test_demand_sum_is_equal_at_every_router(self) -> None:
        shares = {"a": OWN, "b": OTHER, "c": replace(OWN, desired_replicas=0.5)}
        totals = []
        for name, own in shares.items():
            peers = PeerShares()
            for peer, share in shares.items():
                if peer != name:
                    peers.add_report(0.0, peer, report(share))
            totals.append(peers.total(1.0, own))
        assert totals[0] == totals[1] == totals[2]
        assert totals[0].desired_replicas == 4.25

    def test_latest_demand_report_is_used_in_any_arrival_order(self) -> None:
        peers = PeerShares()
        peers.add_report(2.0, "other", report(OTHER))
        peers.add_report(1.0, "other", report(replace(OTHER, in_flight=99)))
        assert peers.total(2.5, OWN).in_flight == 7
        peers.add_report(3.0, "other", report(replace(OTHER, in_flight=5)))
        assert peers.total(3.5, OWN).in_flight == 8

    def test_demand_share_without_first_tokens_has_full_attainment(self) -> None:
        assert NO_SHARE.slo_attainment == 1.0
        assert not NO_SHARE.active


class TestOtherShares:
    """Tests of the other routers' desired replicas, which a router uses when it adds members for a missed SLO."""

    def test_other_shares_contain_the_report_of_each_router(self) -> None:
        peers = PeerShares()
        assert peers.others(0.0) == ()
        peers.add_report(0.0, "other", report(OTHER))
        peers.add_report(1.0, "third", report(OWN))
        got = peers.others(1.5)
        assert got is not None
        assert [each.desired_replicas for each in got] == [2.25, 1.5]
        assert [(each.first_tokens.count, each.first_tokens.slo_met) for each in got] == [(30, 15), (10, 9)]

    def test_other_shares_are_none_if_a_router_sends_no_report(
        self,
    ) -> None:
        peers = PeerShares()
        peers.add_report(0.0, "other", report(OTHER))
        peers.add_report(REMEMBERED_S - 1.0, "third", report(OWN))
        peers.expire(REMEMBERED_S - 1.0)
        assert peers.others(REMEMBERED_S - 1.0) is None
        peers.expire(REMEMBERED_S)
        assert peers.others(REMEMBERED_S) is not None
        peers.note_alive(REMEMBERED_S, "older")
        assert peers.others(REMEMBERED_S) is None


class TestStoppedRouter:
    """Tests of a stopped router: one of three routers with a total demand of 12 instances; its traffic moves to the
    others.
    """

    def test_stopped_router_share_counts_until_routers_measure_it(self) -> None:
        peers = PeerShares()
        peers.add_report(0.0, "gone", report(Share(desired_replicas=4.0, held=2), Share(desired_replicas=12.0, held=2)))
        for now in range(int(REMEMBERED_S) + 20):
            moved = min(1.0, now / REMEMBERED_S)
            peers.add_report(float(now), "stays", report(Share(desired_replicas=4.0 + 2.0 * moved)))
            peers.expire(float(now))
            total = peers.total(float(now), Share(desired_replicas=4.0 + 2.0 * moved))
            # Before its removal, the silent router's report still counts, so the sum is 12 plus the traffic that has
            # moved.
            assert 12.0 <= total.desired_replicas <= 12.0 + 4.0 * PEER_TTL_S / REMEMBERED_S
            assert total.held == (2 if now < REMEMBERED_S else 0)

    def test_live_demand_sum_drops_after_a_router_stops(self) -> None:
        peers = PeerShares()
        peers.add_report(0.0, "gone", report(Share(desired_replicas=4.0), Share(desired_replicas=12.0)))
        assert peers.live(PEER_TTL_S, Share(desired_replicas=8.0)).desired_replicas == 8.0

    def test_restarted_router_demand_is_counted_once(self) -> None:
        """The restarted router measures the same traffic as before, so the sum must not grow."""
        peers = PeerShares()
        peers.add_report(0.0, "router-1", report(Share(desired_replicas=6.0), Share(desired_replicas=12.0)))
        peers.add_report(5.0, "router-2", report(Share(desired_replicas=6.0)))
        assert peers.total(5.0, Share(desired_replicas=6.0)).desired_replicas == 12.0

    def test_started_router_uses_reports_of_the_previous_router(self) -> None:
        """The started router has no traffic yet, and the autoscaler may read only this router."""
        peers = PeerShares()
        peers.add_report(-20.0, "before", report(Share(desired_replicas=5.0, in_flight=40)))
        assert peers.total(0.0, NO_SHARE) == Share(desired_replicas=5.0, in_flight=40)
        assert peers.total(REMEMBERED_S - 20.0, NO_SHARE) == NO_SHARE

    def test_largest_sum_of_stopped_routers_is_used(self) -> None:
        peers = PeerShares()
        peers.add_report(0.0, "a", report(Share(desired_replicas=4.0), Share(desired_replicas=12.0)))
        peers.add_report(20.0, "b", report(Share(desired_replicas=5.0), Share(desired_replicas=9.0)))
        own = Share(desired_replicas=6.0)
        assert peers.total(30.0, own).desired_replicas == 12.0
        assert peers.total(REMEMBERED_S, own).desired_replicas == 9.0
        assert peers.total(20.0 + REMEMBERED_S, own).desired_replicas == 6.0

    def test_stopped_router_attainment_is_excluded(self) -> None:
        peers = PeerShares()
        peers.add_report(0.0, "gone", report(OTHER, SUM))
        assert peers.total(PEER_TTL_S, OWN).slo_attainment == 0.9

    def test_stopped_router_share_expires(self) -> None:
        peers = PeerShares()
        peers.add_report(0.0, "gone", report(OTHER))
        peers.note_alive(0.0, "gone")
        peers.expire(REMEMBERED_S)
        assert peers.total(0.0, OWN) == OWN


class TestOlderRouters:
    def test_older_router_without_report_makes_demand_sum_incomplete(self) -> None:
        peers = PeerShares()
        peers.note_alive(0.0, "older")
        assert peers.incomplete(1.0)
        assert not peers.incomplete(PEER_TTL_S)
        peers.add_report(0.0, "older", report(OTHER))
        assert not peers.incomplete(1.0)

    def test_router_active_after_its_report_keeps_sum_complete(self) -> None:
        peers = PeerShares()
        peers.add_report(0.0, "leaves", report(OTHER))
        peers.note_alive(PEER_TTL_S + 1.0, "leaves")
        assert not peers.incomplete(PEER_TTL_S + 1.0)


class TestOwnShare:
    @pytest.fixture
    def pool(self) -> Pool:
        return builders.pool(2)

    def status(self, pool: Pool) -> PoolSnapshot:
        return PoolRouter(pool).status()

    def test_own_demand_share_without_traffic_is_empty(self, pool: Pool) -> None:
        assert share_of(100.0, Scaling(pool), self.status(pool)) == NO_SHARE

    @pytest.mark.parametrize(
        "busy",
        [
            pytest.param({"in_flight": 1}, id="in flight"),
            pytest.param({"in_flight": 1, "state": MemberState.DRAINING.value}, id="in flight where one drains"),
            pytest.param({"held_prefill_tokens": 10}, id="held"),
        ],
    )
    def test_own_demand_share_is_active_while_requests_are_open(self, pool: Pool, busy: dict[str, object]) -> None:
        status = self.status(pool)
        busy_one = replace(status.endpoints[0], **busy)
        status = replace(status, endpoints=(busy_one, *status.endpoints[1:]))
        share = share_of(1000.0, Scaling(pool), status)
        assert share.active
        assert share.in_flight == busy_one.in_flight

    @pytest.mark.parametrize("came", ["add", "reject", "enqueue"])
    def test_own_demand_share_is_active_a_minute_after_last_request(self, pool: Pool, came: str) -> None:
        scaling, status = Scaling(pool), self.status(pool)
        if came == "add":
            scaling.window.add(100.0, uncached_tokens=10, cached_tokens=0)
        else:
            getattr(scaling.window, came)(100.0)
        assert share_of(100.0, scaling, status).active
        assert share_of(154.9, scaling, status).active
        assert share_of(160.0, scaling, status) == NO_SHARE

    def test_own_demand_share_counts_prompts_queued_without_members(self, pool: Pool) -> None:
        empty = replace(self.status(replace(pool, members=())), held=400, unplaced_prefill_tokens=6_000_000)
        share = share_of(1000.0, Scaling(pool), empty)
        assert share.pending_prefill_tokens == 6_000_000
        assert share.desired_replicas == pytest.approx(6_000_000 / 60 / pool.engine.prefill_tokens_per_second)

    def test_own_demand_share_counts_first_tokens(self, pool: Pool) -> None:
        scaling = Scaling(pool)
        for within_slo in (True, True, False):
            scaling.window.first_token(100.0, within_slo=within_slo)
        share = share_of(101.0, scaling, self.status(pool))
        assert (share.first_tokens, share.slo_met) == (3, 2)
