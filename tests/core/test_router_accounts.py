"""Tests of the router's load of open requests: no event order leaks load, and every end counts once."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import members, pool, request, text_of
from core.routers import decide, loads
from dualmap.fleet.ledger import IN_FLIGHT_TTL_S
from dualmap.policies.registry import POLICIES
from dualmap.requests import Decision, Usage
from dualmap.router import PoolRouter

EVENTS = st.lists(
    st.tuples(st.sampled_from(["new", "token", "finish", "abort", "served", "pool", "time"]), st.integers(0, 25)),
    max_size=60,
)


@pytest.mark.parametrize("policy", POLICIES)
@given(events=EVENTS)
@settings(max_examples=25)
def test_router_accounts_are_empty_after_any_event_order(policy: str, events: list[tuple[str, int]]) -> None:
    router, now, count = PoolRouter(pool(4, policy=policy)), 0.0, 0
    for kind, n in events:
        now += 0.3
        if kind == "new":
            router.on_request(now, request(str(count), text_of(100 * n, str(n % 5)), now=now))
            count += 1
        elif kind == "token":
            router.on_first_token(now, str(n))
        elif kind == "finish":
            router.on_finished(now, str(n), Usage(cached_tokens=n))
        elif kind == "abort":
            router.on_aborted(now, str(n))
        elif kind == "served":
            router.on_served(now, str(n), f"10.0.0.{n % 6}:8000")
        elif kind == "pool":
            router.on_pool(now, replace(pool(4, policy=policy), members=members(n % 5), ring_version=n))
        else:
            now += 20.0 * n
            router.on_deadline(now)
        assert all(total >= 0 for total in loads(router))
    router.on_pool(now, pool(4, policy=policy))
    for n in range(count):
        router.on_finished(now, str(n))
    assert loads(router) == (0, 0, 0)
    assert router.next_deadline() is None


def test_request_without_events_expires() -> None:
    router = PoolRouter(pool())
    decide(router, "1", text_of(500, "x"))
    assert router.next_deadline() == IN_FLIGHT_TTL_S
    assert router.on_deadline(IN_FLIGHT_TTL_S - 1).answer == ()
    assert [each.predicted_cached_tokens for each in router.on_deadline(IN_FLIGHT_TTL_S).answer] == [0]
    assert loads(router) == (0, 0, 0)
    assert sum(each.indexed_blocks for each in router.status().endpoints) == 0


def test_request_update_postpones_its_expiry() -> None:
    router = PoolRouter(pool())
    decide(router, "1", text_of(500, "x"))
    router.on_heard(300.0, "1")
    router.on_heard(300.0, "unknown")
    assert router.next_deadline() == 300.0 + IN_FLIGHT_TTL_S


def test_failing_engine_does_not_attract_requests_by_prefix() -> None:
    router = PoolRouter(pool())
    for n in range(5):
        assert decide(router, str(n), text_of(3000, "x"), float(n)).receipt.matched_tokens == 0
        router.on_aborted(n + 0.1, str(n))
    # If the client disconnects after the prefill, the cache has the request's blocks.
    decide(router, "a", text_of(3000, "x"), 10.0)
    router.on_first_token(10.5, "a")
    router.on_aborted(11.0, "a")
    assert decide(router, "b", text_of(3000, "x"), 12.0).receipt.matched_tokens == 3000 // 128 * 128


def test_aborted_request_keeps_shared_cached_blocks() -> None:
    router = PoolRouter(pool(1))
    decide(router, "1", text_of(512, "x"))
    decide(router, "2", text_of(512, "x"))
    router.on_aborted(0.1, "1")
    router.on_first_token(0.5, "2")
    assert decide(router, "3", text_of(512, "x"), 1.0).receipt.matched_tokens == 512


def test_unstreamed_response_does_not_stall_a_member() -> None:
    router = PoolRouter(pool(1))
    whole = request("1", text_of(7000, "x"))._replace(streamed=False)
    assert isinstance(router.on_request(0.0, whole).answer, Decision)
    assert decide(router, "2", text_of(7000, "x"), 20.0).receipt.predicted_ttft_s < 0.1


def test_completion_has_predicted_and_measured_hits() -> None:
    router = PoolRouter(pool())
    decide(router, "1", text_of(512, "x"))
    router.on_finished(0.5, "1", Usage(cached_tokens=0))
    decide(router, "2", text_of(512, "x"), 1.0)
    first_token = router.on_first_token(1.25, "2").answer
    assert first_token is not None
    assert (first_token.ttft_s, first_token.within_slo) == (0.25, True)
    completion = router.on_finished(2.0, "2", Usage(cached_tokens=496)).answer
    assert completion is not None
    assert (completion.predicted_cached_tokens, completion.measured_cached_tokens) == (512, 496)
    assert router.on_finished(2.1, "2").answer is None


def test_on_served_moves_load_and_cache_to_the_serving_member() -> None:
    router = PoolRouter(pool())
    decision = decide(router, "1", text_of(512, "x"))
    chosen, other = decision.receipt.chosen, decision.endpoints[1]
    assert router.on_served(0.1, "1", decision.endpoints[0]).answer is False
    assert router.on_served(0.1, "1", other).answer is True
    by_id = {each.id: each for each in router.status().endpoints}
    assert (by_id[chosen].in_flight, by_id[chosen].indexed_blocks) == (0, 0)
    moved = next(each for each in by_id.values() if each.endpoint == other)
    assert (moved.in_flight, moved.pending_prefill_tokens, moved.indexed_blocks) == (1, 512, 4)
    assert router.on_served(0.1, "unknown", other).answer is False
    assert router.on_served(0.1, "1", "10.9.9.9:1").answer is False
