"""Tests of the tier of fetched tokens: in the estimate, in the choice, in the accounts and in what is learnt."""

from dataclasses import replace

import pytest

from builders import NEVER_HOLD, members, pool, request, text_of
from dualmap.fleet.estimate import Speed
from dualmap.fleet.fetches import SPEED_BOUND, FetchSpeed, StoreTier
from dualmap.kv_store.view import StoreMatch
from dualmap.ownership.messages import Sent
from dualmap.pools.kv_store import KvStore, StoreType
from dualmap.pools.pool import Engine, Pool, Routing
from dualmap.requests import Decision, Request, SentRequest, Usage
from dualmap.router import PoolRouter

STORE = KvStore(type=StoreType.MOONCAKE, endpoint="http://127.0.0.1:9003", fetch_tokens_per_second=100_000)
SPEED = Speed(1e-4, 0.0)
TOKENS = 8192


def stored_pool(count: int = 4, *, policy: str = "dualmap", store: KvStore = STORE) -> Pool:
    return replace(pool(count, policy=policy), kv_store=store)


def stored(
    id: str, tokens: int, *, now: float = 0.0, seed: str = "a", held_at: dict[str, int] | None = None
) -> Request:
    match = StoreMatch(tokens, tuple((held_at or {}).items()))
    return request(id, text_of(TOKENS, seed), now=now)._replace(stored=match)


def decide(router: PoolRouter, request: Request) -> Decision:
    decision = router.on_request(request.arrived_s, request).answer
    assert isinstance(decision, Decision)
    return decision


def test_fetch_takes_the_place_of_computing_if_it_is_faster() -> None:
    tier = StoreTier(tokens=800, token_s=1e-5)

    assert tier.prefill(SPEED, 1000, 300) == (500, pytest.approx(500 * 1e-5 + 200 * 1e-4))


def test_fetch_that_is_slower_than_computing_does_not_count() -> None:
    tier = StoreTier(tokens=800, token_s=2e-4)

    assert tier.prefill(SPEED, 1000, 300) == (0, pytest.approx(700 * 1e-4))


def test_store_with_less_than_the_member_changes_nothing() -> None:
    assert StoreTier(tokens=300, token_s=1e-9).prefill(SPEED, 1000, 300) == (0, pytest.approx(700 * 1e-4))


def test_fetch_speed_follows_the_median_within_bounds() -> None:
    fetches = FetchSpeed(100_000)
    for number in range(30):
        fetches.observe(float(number), 0, tokens=1000, seconds=0.1)
    assert fetches.token_s == pytest.approx(1e-4)
    for number in range(30):
        fetches.observe(float(number), 0, tokens=1000, seconds=1e9)
    assert fetches.token_s == pytest.approx(SPEED_BOUND / 100_000)


def test_one_client_among_others_does_not_set_the_fetch_speed() -> None:
    fetches = FetchSpeed(100_000)
    for number in range(8):
        fetches.observe(1.0, 1 + number, tokens=1000, seconds=0.01)
    for _ in range(50):
        fetches.observe(2.0, 99, tokens=1000, seconds=1e9)

    assert fetches.token_s == pytest.approx(1e-5)


def test_changed_first_guess_resets_the_fetch_speed() -> None:
    fetches = FetchSpeed(100_000)
    for number in range(30):
        fetches.observe(float(number), 0, tokens=1000, seconds=0.1)
    fetches.set_prior(100_000)
    assert fetches.token_s == pytest.approx(1e-4)
    fetches.set_prior(200_000)
    assert fetches.token_s == pytest.approx(1 / 200_000)


def test_stored_prefix_shortens_the_predicted_ttft_and_is_in_the_receipt() -> None:
    without = decide(PoolRouter(stored_pool()), stored("r", 0)).receipt
    receipt = decide(PoolRouter(stored_pool()), stored("r", 4096)).receipt

    assert (without.fetch_tokens, receipt.fetch_tokens, receipt.matched_tokens) == (0, 4096, 0)
    assert receipt.predicted_ttft_s < 0.6 * without.predicted_ttft_s
    assert "matched=0" in receipt.header()
    assert receipt.header().endswith(", fetch=4096")
    said = receipt.as_json()
    candidates = said["candidates"]
    assert isinstance(candidates, list)
    assert (said["fetch_tokens"], candidates[0]["fetch_tokens"], candidates[0]["compute_tokens"]) == (4096, 4096, 4096)


def test_receipt_of_a_pool_without_store_names_no_fetch() -> None:
    receipt = decide(PoolRouter(pool(4)), stored("r", 4096)).receipt

    assert "fetch" not in receipt.header()
    assert "fetch" not in str(receipt.as_json())


def test_costs_of_all_members_equal_the_candidates_costs() -> None:
    router = PoolRouter(stored_pool(6, policy="min_ttft"))
    decide(router, stored("first", 0, seed="a"))
    router.on_first_token(1.0, "first")

    receipt = decide(router, stored("second", 6000, now=2.0, seed="a")).receipt

    # The holder of the prompt computes one token; every other member fetches 6000 and computes the rest.
    assert receipt.matched_tokens >= 8000
    assert receipt.fetch_tokens == 0


def test_loaded_holder_is_left_where_others_can_fetch() -> None:
    """The spill of DualMap takes a cold member by its fetch, and without a store stays at the loaded holder."""
    engine = Engine(prefill_tokens_per_second=7000)
    chosen = {}
    for tokens in (0, 8000):
        router = PoolRouter(replace(stored_pool(8), engine=engine))
        holder = decide(router, stored("first", 0, seed="a")).receipt.chosen
        router.on_first_token(1.0, "first")
        router.on_finished(1.0, "first")
        subset = frozenset(each.endpoint for each in members(8) if each.id == holder)
        for number in range(3):
            load = request(f"load{number}", text_of(TOKENS, f"l{number}"), now=2.0)._replace(subset=subset)
            decide(router, load)
        receipt = decide(router, stored("again", tokens, now=2.0, seed="a")).receipt
        chosen[tokens] = (receipt.chosen == holder, receipt.fetch_tokens)
    assert chosen[8000] == (False, 8000)
    assert chosen[0][1] == 0


def test_fetched_tokens_are_no_pending_prefill() -> None:
    router = PoolRouter(stored_pool())

    chosen = decide(router, stored("r", 8000)).receipt.chosen

    status = {each.id: each.pending_prefill_tokens for each in router.status().endpoints}
    assert status[chosen] == TOKENS - 8000


def test_slow_fetches_are_learnt_until_they_no_longer_count() -> None:
    """A store that does not hold what it says makes each prefill as slow as computing."""
    router = PoolRouter(stored_pool(1))
    fetched = []
    for number in range(30):
        now = 100.0 * number
        receipt = decide(router, stored(str(number), 8000, now=now, seed=f"s{number}")).receipt
        fetched.append(receipt.fetch_tokens)
        router.on_first_token(now + 3.0, str(number))
        router.on_finished(now + 3.0, str(number))

    assert fetched[0] == 8000
    assert fetched[-1] == 0


def test_prefill_with_a_small_fetch_teaches_the_prefill_speed() -> None:
    router = PoolRouter(stored_pool(1))
    for number in range(30):
        now = 100.0 * number
        decide(router, stored(str(number), 256, now=now, seed=f"s{number}"))
        router.on_first_token(now + 4.0, str(number))
        router.on_finished(now + 4.0, str(number))

    (endpoint,) = router.status().endpoints
    assert endpoint.solo_tokens_per_second < 3500


def test_stored_tokens_in_usage_say_nothing_about_the_member() -> None:
    """The engine counts fetched tokens as cached: no report of more cached tokens than the member had."""
    router = PoolRouter(stored_pool(1))
    decide(router, stored("r", 8000))
    router.on_first_token(1.0, "r")

    usage = Usage(prompt_tokens=TOKENS, completion_tokens=1, cached_tokens=8000)
    completion = router.on_finished(2.0, "r", usage).answer

    assert completion is not None
    assert completion.predicted_cached_tokens == 0
    assert completion.measured_cached_tokens == 8000


def test_request_of_another_router_is_accounted_for_with_its_fetch() -> None:
    router = PoolRouter(stored_pool(1))
    sent = SentRequest(
        request=stored("r", 8000), endpoint=members(1)[0].endpoint, sent_s=0.0, matched_tokens=0,
        predicted_ttft_s=1.0, prefilled=False,
    )  # fmt: skip

    assert router.take_over(0.0, Sent.of(0.0, sent).received(0.0))

    assert router.status().endpoints[0].pending_prefill_tokens == TOKENS - 8000


def test_llumnix_prefers_the_host_that_the_store_says_holds_the_prompt() -> None:
    router = PoolRouter(stored_pool(4, policy="llumnix"))
    host = members(4)[2]

    receipt = decide(router, stored("r", 4096, held_at={host.address: 4096})).receipt

    assert receipt.chosen == host.id


def test_llumnix_without_holders_ignores_the_store() -> None:
    routers = [PoolRouter(stored_pool(4, policy="llumnix")) for _ in range(2)]

    chosen = {decide(each, stored("r", tokens)).receipt.chosen for each, tokens in zip(routers, (0, 4096), strict=True)}

    assert len(chosen) == 1


def test_pool_without_store_ignores_what_requests_say() -> None:
    routing = Routing(queue=NEVER_HOLD)
    receipts = [
        decide(PoolRouter(replace(pool(4, routing=routing))), stored("r", tokens)).receipt for tokens in (0, 8000)
    ]

    assert receipts[0] == receipts[1]
