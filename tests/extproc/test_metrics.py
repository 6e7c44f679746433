import re
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

import builders
from dualmap.pool import Member, MemberState, Pool
from dualmap.receipt import Key, Receipt
from dualmap.requests import Completion, Decision, EndpointStatus, FirstToken, PoolStatus, Reason, Refusal
from dualmap.router import PoolRouter
from dualmap_extproc.access_log import AccessLogObserver
from dualmap_extproc.counts import Traffic
from dualmap_extproc.demand import Demand
from dualmap_extproc.discovery import DiscoveryObserver
from dualmap_extproc.errors import model_not_found, no_endpoint, refused_by_router
from dualmap_extproc.metrics import Metrics
from dualmap_extproc.observer import Observer
from dualmap_extproc.pools.metrics import KubeMetrics
from dualmap_extproc.store.contract import Failure
from dualmap_extproc.store.exchange import StoreObserver
from dualmap_extproc.store.metrics import StoreMetrics

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"
POOL = "llm/qwen"


def decision(chosen: str = "m-0", *, rule: str = "pair-warm", prompt: int = 100, matched: int = 60) -> Decision:
    receipt = Receipt(
        pool=POOL,
        policy="dualmap",
        rule=rule,
        reason="",
        key=Key(hash=1, blocks=1, tokens=128),
        pair=("m-0", "m-1"),
        chosen=chosen,
        address="10.0.0.1:8000",
        prompt_tokens=prompt,
        matched_tokens=matched,
        predicted_ttft_s=0.1,
        candidates=(),
    )
    return Decision(request_id="r", endpoints=("10.0.0.1:8000",), receipt=receipt)


def first_token(member: str = "m-0", *, ttft_s: float = 0.3, within_slo: bool = True) -> FirstToken:
    return FirstToken(member=member, ttft_s=ttft_s, predicted_ttft_s=0.2, within_slo=within_slo)


def completion(member: str = "m-0", *, measured: int | None = None) -> Completion:
    return Completion(member=member, predicted_cached_tokens=60, measured_cached_tokens=measured)


def status(*states: MemberState, pool: str = POOL) -> PoolStatus:
    endpoints = tuple(
        EndpointStatus(
            id=f"m-{n}",
            endpoint=f"10.0.0.{n + 1}:8000",
            state=state.value,
            weight=100,
            in_flight=n + 1,
            held=10 * n,
            pending_prefill_tokens=1000 * (n + 1),
            held_prefill_tokens=700 * n,
            active_kv_tokens=5000,
            indexed_blocks=40,
            prefill_tokens_per_second=6500.499999999999,
            solo_tokens_per_second=6600.0,
            suspended=state is MemberState.DRAINING,
        )
        for n, state in enumerate(states)
    )
    return PoolStatus(
        pool=pool,
        ring_version=7,
        held=13,
        sessions=21,
        peers=3,
        endpoints=endpoints,
        hotness_nodes=12,
        split_prefixes=2,
    )


def metrics(*pools: Pool) -> Metrics:
    made = Metrics(version="1.2.3", replica_id="router-0")
    made.set_pools(pools or (builders.pool(2),))
    return made


def families(made: Metrics, *statuses: PoolStatus) -> list[Metric]:
    return list(text_string_to_metric_families(made.render(statuses, made.signals(statuses)).decode()))


def samples(made: Metrics, *statuses: PoolStatus) -> dict[str, float]:
    """Every sample as ``name{label=value,...}`` with sorted labels."""
    found = {}
    for family in families(made, *statuses):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            key = f"{sample.name}{{{labels}}}"
            assert key not in found
            found[key] = sample.value
    return found


def everything(made: Metrics) -> None:
    """Let every event happen once."""
    made.routed(POOL, decision())
    made.routed_bodiless(POOL)
    made.refused(no_endpoint(POOL))
    made.refused(model_not_found("m"))
    made.decided(0.0003)
    made.first_token(POOL, first_token())
    made.finished(POOL, completion())
    made.rejected(POOL, completion())
    made.aborted(POOL, completion())
    made.failed(POOL, completion())
    made.waited(POOL, 1.5)
    made.expired(POOL, completion())
    made.measured(POOL, completion(measured=50))
    made.served_elsewhere(POOL)
    made.discovery_streams(3)
    made.discovery_pushed()
    made.discovery_rejected()
    made.access_log_entries(known=5, others=2)
    made.access_log_unreadable()
    made.pools_refused()
    made.pool_file_refused(True)


class TestCounting:
    def test_it_is_what_the_data_path_reports_to(self) -> None:
        made = metrics()
        ports: tuple[Observer, DiscoveryObserver, AccessLogObserver] = (made, made, made)
        for port in (Observer, DiscoveryObserver, AccessLogObserver):
            for name in [each for each in vars(port) if not each.startswith("_")]:
                assert callable(getattr(made, name))
        assert ports[0] is made

    def test_each_event_counts_where_it_belongs(self) -> None:
        made = metrics()
        before = samples(made)
        everything(made)
        after = samples(made)
        changed = {name: value - before.get(name, 0) for name, value in after.items() if value != before.get(name)}
        at = f"endpoint=m-0,pool={POOL}"
        assert {name: value for name, value in changed.items() if "_seconds" not in name} == {
            f"dualmap_requests_total{{{at}}}": 1,
            f"dualmap_prompt_tokens_total{{{at}}}": 100,
            f"dualmap_predicted_cached_tokens_total{{{at}}}": 60,
            f"dualmap_checked_cached_tokens_total{{{at}}}": 60,
            f"dualmap_measured_cached_tokens_total{{{at}}}": 50,
            f"dualmap_first_tokens_total{{{at},slo=met}}": 1,
            f"dualmap_completions_total{{endpoint=m-0,outcome=finished,pool={POOL}}}": 1,
            f"dualmap_completions_total{{endpoint=m-0,outcome=rejected,pool={POOL}}}": 1,
            f"dualmap_completions_total{{endpoint=m-0,outcome=aborted,pool={POOL}}}": 1,
            f"dualmap_completions_total{{endpoint=m-0,outcome=failed,pool={POOL}}}": 1,
            f"dualmap_completions_total{{endpoint=m-0,outcome=expired,pool={POOL}}}": 1,
            f"dualmap_decisions_total{{pool={POOL},rule=pair-warm}}": 1,
            f"dualmap_bodiless_requests_total{{pool={POOL}}}": 1,
            f"dualmap_served_elsewhere_total{{pool={POOL}}}": 1,
            f"dualmap_refused_requests_total{{code=no_endpoint,pool={POOL}}}": 1,
            "dualmap_refused_requests_total{code=model_not_found,pool=}": 1,
            "dualmap_discovery_streams{}": 3,
            "dualmap_discovery_pushes_total{}": 1,
            "dualmap_discovery_rejections_total{}": 1,
            "dualmap_access_log_entries_total{picked=yes}": 5,
            "dualmap_access_log_entries_total{picked=no}": 2,
            "dualmap_access_log_unreadable_batches_total{}": 1,
            "dualmap_pool_refusals_total{}": 1,
            "dualmap_pool_file_refused{}": 1,
        }
        assert changed[f"dualmap_ttft_seconds_sum{{pool={POOL}}}"] == pytest.approx(0.3)
        assert changed[f"dualmap_ttft_seconds_count{{pool={POOL}}}"] == 1
        assert changed[f"dualmap_predicted_ttft_seconds_sum{{pool={POOL}}}"] == pytest.approx(0.2)
        assert changed[f"dualmap_predicted_ttft_seconds_count{{pool={POOL}}}"] == 1
        assert changed[f"dualmap_held_seconds_sum{{pool={POOL}}}"] == 1.5
        assert changed[f"dualmap_held_seconds_bucket{{le=2.0,pool={POOL}}}"] == 1
        assert changed["dualmap_decision_seconds_sum{}"] == pytest.approx(0.0003)

    def test_first_tokens_in_time_and_late(self) -> None:
        made = metrics()
        made.first_token(POOL, first_token("m-1", within_slo=True))
        made.first_token(POOL, first_token("m-1", within_slo=False, ttft_s=7))
        made.first_token(POOL, first_token("m-1", within_slo=False, ttft_s=9))
        got = samples(made)
        assert got[f"dualmap_first_tokens_total{{endpoint=m-1,pool={POOL},slo=met}}"] == 1
        assert got[f"dualmap_first_tokens_total{{endpoint=m-1,pool={POOL},slo=missed}}"] == 2
        assert got[f"dualmap_ttft_seconds_bucket{{le=5.0,pool={POOL}}}"] == 1

    def test_a_completion_without_a_measurement_measures_nothing(self) -> None:
        made = metrics()
        before = samples(made)
        made.measured(POOL, completion(measured=None))
        assert samples(made) == before

    def test_series_of_an_endpoint_exist_before_its_first_request(self) -> None:
        """So that a rate over the first request is not lost."""
        got = samples(metrics())
        assert got[f"dualmap_requests_total{{endpoint=m-1,pool={POOL}}}"] == 0
        assert got[f"dualmap_completions_total{{endpoint=m-1,outcome=aborted,pool={POOL}}}"] == 0

    def test_two_of_them_share_nothing(self) -> None:
        one, other = metrics(), metrics()
        everything(one)
        assert samples(other) == samples(metrics())

    def test_the_page_says_who_speaks_and_not_when_series_were_made(self) -> None:
        got = samples(metrics())
        assert got["dualmap_build_info{replica=router-0,version=1.2.3}"] == 1
        assert not [name for name in got if "_created" in name]

    @pytest.mark.parametrize("reason", [Reason.QUEUE_FULL, Reason.WAITED_TOO_LONG])
    def test_requests_that_may_not_wait_are_counted_by_why(self, reason: Reason) -> None:
        made = metrics()
        made.refused(refused_by_router(POOL, Refusal(request_id="r", reason=reason)))
        assert samples(made)[f"dualmap_refused_requests_total{{code={reason.value},pool={POOL}}}"] == 1
        assert made.traffic(POOL).refused == 1

    def test_a_pool_that_holds_nothing_says_so(self) -> None:
        """A gauge that is absent cannot be told from a router that is."""
        assert (
            samples(metrics(), PoolRouter(builders.pool(2)).status())[f"dualmap_pool_held_requests{{pool={POOL}}}"] == 0
        )

    def test_traffic_totals(self) -> None:
        made = metrics()
        everything(made)
        made.first_token(POOL, first_token(within_slo=False))
        assert made.traffic(POOL) == Traffic(
            requests=1,
            refused=1,
            first_tokens=2,
            slo_met=1,
            prompt_tokens=100,
            predicted_cached_tokens=60,
            measured_cached_tokens=50,
        )
        assert made.traffic("llm/unknown") == Traffic()


class TestLoads:
    def test_gauges_are_the_statuses_of_the_moment(self) -> None:
        made = metrics()
        got = samples(made, status(MemberState.ACTIVE, MemberState.DRAINING))
        at = f"endpoint=m-1,pool={POOL}"
        assert got[f"dualmap_endpoint_pending_prefill_tokens{{{at}}}"] == 2000
        assert got[f"dualmap_endpoint_in_flight_requests{{{at}}}"] == 2
        assert got[f"dualmap_endpoint_active_kv_tokens{{{at}}}"] == 5000
        assert got[f"dualmap_endpoint_prefill_tokens_per_second{{{at}}}"] == 6500.5
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


class TestSignals:
    """What reaches the rule, whose own tests are tests/core/test_scaling.py."""

    def told(self) -> tuple[Metrics, list[float]]:
        """Metrics, and a list that holds their time."""
        clock = [1000.0]
        made = Metrics(version="1.2.3", replica_id="router-0", demand=Demand(lambda: clock[0]))
        made.set_pools([builders.pool(2)])
        return made, clock

    def shown(self, made: Metrics, name: str, *states: MemberState) -> float:
        # Nothing is held: requests that have come to be held are arrivals, too.
        return samples(made, replace(status(*states), held=0))[f"dualmap_pool_{name}{{pool={POOL}}}"]

    def test_the_uncached_part_of_routed_prompts_arrives(self) -> None:
        made, clock = self.told()
        for _ in range(100):
            clock[0] += 1
            made.routed(POOL, decision())
        assert self.shown(made, "arriving_uncached_tokens_per_second") == pytest.approx(40, rel=0.02)
        clock[0] += 60
        assert self.shown(made, "arriving_uncached_tokens_per_second") == 0

    def test_requests_without_an_instance_are_wished_one_and_bad_ones_are_not(self) -> None:
        made, _ = self.told()
        idle, name = replace(status(), held=0), f"dualmap_pool_desired_replicas{{pool={POOL}}}"
        made.refused(replace(model_not_found("m"), pool=POOL))
        assert samples(made, idle)[name] == 0
        made.refused(no_endpoint(POOL))
        assert 0 < samples(made, idle)[name] < 1

    @pytest.mark.parametrize("reason", list(Reason))
    def test_who_is_refused_counts_like_the_others(self, reason: Reason) -> None:
        made, clock = self.told()
        for _ in range(100):
            clock[0] += 1
            made.routed(POOL, decision())
            made.refused(refused_by_router(POOL, Refusal(request_id="r", reason=reason)))
        assert self.shown(made, "arriving_uncached_tokens_per_second") == pytest.approx(80, rel=0.02)

    def test_attainment_is_of_the_last_minute_and_absent_without_first_tokens(self) -> None:
        made, clock = self.told()
        name = f"dualmap_pool_slo_attainment{{pool={POOL}}}"
        assert name not in samples(made, status())
        for within_slo in (True, True, False):
            made.first_token(POOL, first_token(within_slo=within_slo))
        assert samples(made, status())[name] == 0.6667
        clock[0] += 60
        assert name not in samples(made, status())

    def test_what_waits_for_each_endpoint_that_stays(self) -> None:
        made, _ = self.told()
        active = self.shown(made, "pending_prefill_tokens_per_endpoint", MemberState.ACTIVE, MemberState.ACTIVE)
        assert active == (1000 + 2000 + 700) / 2
        draining = self.shown(made, "pending_prefill_tokens_per_endpoint", MemberState.ACTIVE, MemberState.DRAINING)
        assert draining == 1000

    def test_a_pool_that_is_gone_or_not_known_yet_has_none(self) -> None:
        made, _ = self.told()
        made.set_pools([])
        everything(made)
        assert not made.signals([status()])

    def test_a_change_of_the_pool_keeps_what_arrived(self) -> None:
        made, clock = self.told()
        for _ in range(100):
            clock[0] += 1
            made.routed(POOL, decision())
        before = self.shown(made, "arriving_uncached_tokens_per_second")
        made.set_pools([builders.pool(3)])
        assert self.shown(made, "arriving_uncached_tokens_per_second") == before > 0


def test_the_objective_is_shown_as_the_pool_has_it_now() -> None:
    pool = builders.pool(2)
    made = metrics(pool)
    made.set_pools([replace(pool, slo=replace(pool.slo, ttft_s=2.5, attainment=0.95))])
    got = samples(made)
    assert got[f"dualmap_pool_slo_ttft_seconds{{pool={POOL}}}"] == 2.5
    assert got[f"dualmap_pool_slo_goal{{pool={POOL}}}"] == 0.95


class TestVanishing:
    def test_a_member_that_leaves_takes_its_series_along_and_the_others_keep_theirs(self) -> None:
        whole = builders.pool(2)
        made = metrics(whole)
        for member in ("m-0", "m-1"):
            made.routed(POOL, decision(member))
            made.finished(POOL, completion(member))
        made.set_pools([replace(whole, members=whole.members[1:])])
        got = samples(made, status())
        assert not [name for name in got if "endpoint=m-0" in name]
        assert got[f"dualmap_requests_total{{endpoint=m-1,pool={POOL}}}"] == 1
        assert made.traffic(POOL).requests == 2

    def test_news_of_a_member_that_left_does_not_bring_its_series_back(self) -> None:
        whole = builders.pool(2)
        made = metrics(whole)
        made.set_pools([replace(whole, members=whole.members[1:])])
        everything(made)
        assert not [name for name in samples(made) if "endpoint=m-0" in name]
        assert made.traffic(POOL).requests == 1

    def test_a_pool_that_leaves_takes_everything_along(self) -> None:
        made = metrics()
        everything(made)
        made.set_pools([])
        assert not [name for name in samples(made) if POOL in name]
        everything(made)
        assert not [name for name in samples(made) if POOL in name]

    def test_who_comes_back_begins_at_zero(self) -> None:
        made = metrics()
        everything(made)
        made.set_pools([])
        made.set_pools([builders.pool(2)])
        assert samples(made)[f"dualmap_requests_total{{endpoint=m-0,pool={POOL}}}"] == 0
        assert made.traffic(POOL) == Traffic()

    def test_being_told_the_same_again_changes_nothing(self) -> None:
        made = metrics()
        everything(made)
        before = samples(made)
        made.set_pools([builders.pool(2)])
        assert samples(made) == before

    def test_ids_of_any_printable_kind_are_written_so_that_they_can_be_read(self) -> None:
        odd = 'a/b:c@d"e\\f'
        made = metrics(replace(builders.pool(0), members=(Member(id=odd, address="10.0.0.1", port=1),)))
        assert [
            sample.labels["endpoint"]
            for family in families(made)
            for sample in family.samples
            if sample.name == "dualmap_requests_total"
        ] == [odd]


def test_how_the_shared_state_fares_is_counted() -> None:
    made = metrics()
    assert not any("dualmap_store" in name for name in samples(made))
    store: StoreObserver = StoreMetrics(made.registry)
    assert samples(made)["dualmap_store_up{}"] == 0
    store.exchanged(0.003)
    assert samples(made)["dualmap_store_up{}"] == 1
    store.failed(Failure.READ_ONLY)
    store.unreadable(2)
    store.dropped(3)
    found = samples(made)
    assert found["dualmap_store_up{}"] == 0
    assert found["dualmap_store_errors_total{kind=read_only}"] == 1
    assert found["dualmap_store_errors_total{kind=timeout}"] == 0
    assert found["dualmap_store_exchange_seconds_bucket{le=0.005}"] == 1
    assert found["dualmap_store_unreadable_entries_total{}"] == 2
    assert found["dualmap_store_dropped_news_total{}"] == 3


class TestReference:
    def exported(self) -> dict[str, tuple[str, tuple[str, ...]]]:
        made = metrics()
        StoreMetrics(made.registry)
        watches = KubeMetrics(made.registry, made.pools_refused)
        watches.show_ages(lambda: {"pods": 1.0})
        watches.kube_listed("pods")
        watches.kube_failed("pods", "refused")
        everything(made)
        found = {}
        for family in families(made, status(MemberState.ACTIVE)):
            name = f"{family.name}_total" if family.type == "counter" else family.name
            labels = {label for sample in family.samples for label in sample.labels} - {"le"}
            found[name] = (family.type, tuple(sorted(labels)))
        return found

    def documented(self) -> dict[str, tuple[str, tuple[str, ...]]]:
        of_routers, _, _ = DOCUMENT.read_text().partition("## Of the operator")
        rows = re.findall(r"^\| `(dualmap_\w+)` \| (\w+) \| ([^|]*)\|", of_routers, re.MULTILINE)
        assert len(rows) == len({name for name, _, _ in rows})
        return {name: (kind, tuple(sorted(re.findall(r"`(\w+)`", labels)))) for name, kind, labels in rows}

    def test_the_reference_lists_exactly_what_is_exported(self) -> None:
        assert self.documented() == self.exported()

    def test_the_names_of_the_contract_are_there(self) -> None:
        assert self.exported().keys() >= {
            "dualmap_endpoint_pending_prefill_tokens",
            "dualmap_endpoint_in_flight_requests",
            "dualmap_pool_held_requests",
            "dualmap_requests_total",
            "dualmap_predicted_cached_tokens_total",
            "dualmap_measured_cached_tokens_total",
        }
