"""Members that leave at a known time: they get no new keys, and only requests that end before that time."""

from dataclasses import replace

import pytest

from builders import NEVER_HOLD, chain, members, pool, request, text_of
from core.routers import decide
from dualmap.engines.profile import EngineProfile
from dualmap.fleet.suspension import FAILURES_IN_A_ROW
from dualmap.kv_store.view import StoreMatch
from dualmap.pools.kv_store import KvStore, StoreType
from dualmap.pools.pool import (
    Engine,
    Member,
    MemberState,
    Pool,
    Queue,
    Routing,
    Session,
    SessionMigration,
    Tokenizer,
    TokenSource,
)
from dualmap.requests import Decision, Queued, Rejection, Request
from dualmap.router import PoolRouter

EPOCH_S = 1_764_277_200.0
LONG = text_of(8192, "conversation")


def noticed(of: Pool, *, leave_at_s: float, only: str | None = None, weight: int = 100) -> Pool:
    """Return a pool whose members, or the member ``only``, leave at ``leave_at_s`` of the router's clock."""
    return replace(of, members=tuple(_noticed(each, leave_at_s, only, weight) for each in of.members))


def _noticed(member: Member, leave_at_s: float, only: str | None, weight: int) -> Member:
    if only not in (None, member.id):
        return member
    return replace(member, state=MemberState.DRAINING, leave_at_s=EPOCH_S + leave_at_s, weight=weight)


def warmed(of: Pool, *, answer_s: float = 1.0) -> tuple[PoolRouter, str]:
    """Return a router whose answers take ``answer_s``, and the member that holds LONG at time 50."""
    router = PoolRouter(of, epoch_s=EPOCH_S)
    for n in range(8):
        decide(router, f"r-{n}", LONG, now=5.0 * n)
        router.on_first_token(5.0 * n + 1.0, f"r-{n}")
        router.on_finished(5.0 * n + 1.0 + answer_s, f"r-{n}")
    decision = decide(router, "last", LONG, now=49.0)
    router.on_first_token(49.1, "last")
    router.on_finished(49.1 + answer_s, "last")
    return router, decision.receipt.chosen


@pytest.mark.parametrize(("left_s", "stays"), [(30.0, True), (1.0, False), (0.0, False), (-60.0, False)])
def test_warm_prompt_stays_only_while_its_answer_ends_in_time(left_s: float, stays: bool) -> None:
    router, home = warmed(pool(4), answer_s=3.0)
    router.on_pool(60.0, noticed(router.pool, leave_at_s=60.0 + left_s, only=home))
    receipt = decide(router, "next", LONG, now=60.0).receipt
    assert (receipt.chosen == home) is stays
    assert (receipt.rule == "leaving-warm") is stays
    assert (home in [each.id for each in receipt.candidates]) is stays


def test_stay_at_leaving_member_falls_back_to_a_member_that_stays() -> None:
    router, home = warmed(pool(4))
    router.on_pool(60.0, noticed(router.pool, leave_at_s=90.0, only=home))
    decision = decide(router, "next", LONG, now=60.0)
    assert decision.receipt.chosen == home
    assert decision.endpoints[0] == decision.receipt.address
    assert len(decision.endpoints) == 2
    assert home not in decision.receipt.pair


def test_unknown_answer_time_keeps_nothing_at_leaving_member() -> None:
    router = PoolRouter(pool(4), epoch_s=EPOCH_S)
    home = decide(router, "first", LONG).receipt.chosen
    router.on_first_token(1.0, "first")
    router.on_finished(2.0, "first")
    router.on_pool(10.0, noticed(router.pool, leave_at_s=1000.0, only=home))
    assert decide(router, "next", LONG, now=10.0).receipt.chosen != home


def test_new_keys_leave_at_once() -> None:
    router, home = warmed(pool(4))
    router.on_pool(60.0, noticed(router.pool, leave_at_s=3600.0, only=home))
    chosen = {decide(router, f"new-{n}", text_of(2048, f"new {n}"), now=60.0).receipt.chosen for n in range(64)}
    assert chosen == {each.id for each in router.pool.members} - {home}


def test_weight_zero_leaving_member_gets_nothing() -> None:
    router, home = warmed(pool(4))
    router.on_pool(60.0, noticed(router.pool, leave_at_s=3600.0, only=home, weight=0))
    assert decide(router, "next", LONG, now=60.0).receipt.chosen != home


def test_session_leaves_for_a_member_that_fetches_its_kv() -> None:
    store = KvStore(type=StoreType.MOONCAKE, endpoint="http://10.9.9.9:8080", fetch_tokens_per_second=1_000_000.0)
    engine = Engine(tokenizer=Tokenizer(source=TokenSource.FILES, path="/model"))
    router, home = warmed(replace(pool(4, engine=engine), kv_store=store))
    router.on_pool(60.0, noticed(router.pool, leave_at_s=3600.0, only=home))
    assert decide(router, "not stored", LONG, now=60.0).receipt.chosen == home
    stored = Request(id="stored", chain=chain(LONG), arrived_s=60.0, stored=StoreMatch(8192))
    moved = router.on_request(60.0, stored).answer
    assert isinstance(moved, Decision)
    assert moved.receipt.chosen != home
    assert moved.receipt.fetch_tokens


@pytest.mark.parametrize(("left_s", "pulls"), [(30.0, True), (-1.0, False)])
def test_session_pulls_its_kv_from_a_leaving_member_until_its_time(left_s: float, pulls: bool) -> None:
    session = Session(migration=SessionMigration(pull=True))
    router = PoolRouter(pool(4, routing=Routing(queue=NEVER_HOLD, session=session)), epoch_s=EPOCH_S)

    def turn(now: float) -> Decision:
        asked = Request(id=f"turn {now}", chain=chain(LONG), arrived_s=now, session=7)
        decision = router.on_request(now, asked).answer
        assert isinstance(decision, Decision)
        return decision

    host = turn(1.0).receipt
    router.on_first_token(2.0, "turn 1.0")
    router.on_finished(3.0, "turn 1.0")
    router.on_pool(60.0, noticed(router.pool, leave_at_s=60.0 + left_s, only=host.chosen))
    receipt = turn(60.0).receipt
    assert (receipt.moved_from, receipt.kv_source) == (host.chosen, host.address if pulls else "")
    assert bool(receipt.fetch_tokens) is pulls


def queueing(count: int) -> Pool:
    return pool(count, routing=Routing(queue=Queue(dispatch_window_s=0.25)))


def test_queued_requests_move_at_once() -> None:
    router, home = warmed(queueing(2))
    router.on_request(60.0, request("busy", text_of(60_000, "busy"), now=60.0))
    prompts = [request(f"q-{n}", text_of(20_000, f"q {n}"), now=60.0) for n in range(12)]
    waiting = [router.on_request(60.0, each).answer for each in prompts]
    queued = [each.request_id for each in waiting if isinstance(each, Queued)]
    assert any(each.held for each in router.status().endpoints if each.id == home)
    router.on_pool(60.5, noticed(router.pool, leave_at_s=600.0, only=home))
    held = {each.id: each.held for each in router.status().endpoints}
    assert held[home] == 0
    assert sum(held.values()) <= len(queued)


@pytest.mark.parametrize("leave_at_s", [-1e9, 0.0, 59.0, 61.0, 1e11])
@pytest.mark.parametrize("weight", [0, 100])
def test_notice_for_all_members_keeps_the_service(leave_at_s: float, weight: int) -> None:
    router, home = warmed(pool(4))
    router.on_pool(60.0, noticed(router.pool, leave_at_s=leave_at_s, weight=weight))
    decision = decide(router, "next", LONG, now=60.0)
    assert decision.receipt.chosen == home
    assert len(set(decision.endpoints)) == 2
    assert len(router.any_endpoints(None)) == 2
    router.on_deadline(62.0)
    assert decide(router, "later", LONG, now=62.0).receipt.chosen == home


def test_notice_for_all_members_prefers_those_with_time_left() -> None:
    of = noticed(pool(3), leave_at_s=100.0)
    of = replace(of, members=(replace(of.members[0], leave_at_s=EPOCH_S + 10.0), *of.members[1:]))
    router = PoolRouter(of, epoch_s=EPOCH_S)

    def chosen(now: float) -> set[str]:
        return {decide(router, f"{now}-{n}", text_of(512, f"{n}"), now=now).receipt.chosen for n in range(64)}

    assert chosen(1.0) == {"m-0", "m-1", "m-2"}
    assert router.next_deadline() == 10.0
    router.on_deadline(10.0)
    assert chosen(11.0) == {"m-1", "m-2"}


def test_requests_queued_at_a_member_that_has_left_move() -> None:
    of = noticed(queueing(2), leave_at_s=1000.0)
    of = replace(of, members=(replace(of.members[0], leave_at_s=EPOCH_S + 10.0), of.members[1]))
    router = PoolRouter(of, epoch_s=EPOCH_S)
    for n in range(40):
        router.on_request(9.0, request(f"q-{n}", text_of(20_000, f"q {n}"), now=9.0))
    assert all(each.held for each in router.status().endpoints)
    router.on_deadline(10.0)
    assert [each.held > 0 for each in router.status().endpoints] == [False, True]


def test_plain_drain_of_all_members_still_rejects() -> None:
    router = PoolRouter(replace(pool(0), members=members(2, state=MemberState.DRAINING)))
    assert isinstance(router.on_request(0.0, request("a", "hello")).answer, Rejection)


def test_notice_outside_the_subset_has_no_effect() -> None:
    router, home = warmed(pool(4))
    router.on_pool(60.0, noticed(router.pool, leave_at_s=3600.0, only=home))
    others = frozenset(each.endpoint for each in router.pool.members if each.id != home)
    decision = router.on_request(60.0, request("next", LONG, now=60.0, subset=others)).answer
    assert isinstance(decision, Decision)
    assert decision.receipt.chosen != home


def test_subset_of_leaving_members_is_served() -> None:
    router, home = warmed(pool(4))
    router.on_pool(60.0, noticed(router.pool, leave_at_s=61.0, only=home))
    only = frozenset(each.endpoint for each in router.pool.members if each.id == home)
    decision = router.on_request(60.0, request("next", "new", now=60.0, subset=only)).answer
    assert isinstance(decision, Decision)
    assert decision.receipt.chosen == home


def test_status_says_when_a_member_leaves() -> None:
    router = PoolRouter(noticed(pool(2), leave_at_s=90.0, only="m-0"), epoch_s=EPOCH_S)
    assert [each.leave_at_s for each in router.status().endpoints] == [EPOCH_S + 90.0, None]


def test_member_taken_back_gets_its_keys_again() -> None:
    router, home = warmed(pool(4))
    before = router.pool
    router.on_pool(60.0, noticed(before, leave_at_s=61.0, only=home))
    router.on_pool(70.0, before)
    receipt = decide(router, "next", LONG, now=70.0).receipt
    assert receipt.chosen == home
    assert receipt.rule != "leaving-warm"


@pytest.mark.parametrize("left_s", [100.0, -1.0])
def test_leaving_members_serve_while_the_only_staying_member_fails(left_s: float) -> None:
    router = PoolRouter(pool(3), epoch_s=EPOCH_S)
    stays = router.pool.members[0].id
    leaving = noticed(router.pool, leave_at_s=50.0 + left_s).members[1:]
    router.on_pool(50.0, replace(router.pool, members=(router.pool.members[0], *leaving)))
    for number in range(FAILURES_IN_A_ROW):
        assert decide(router, f"failed {number}", text_of(512, f"{number}"), now=50.0).receipt.chosen == stays
        router.on_failed(50.1, f"failed {number}")

    chosen = {decide(router, f"r {n}", text_of(512, f"other {n}"), now=50.2).receipt.chosen for n in range(8)}
    assert chosen == {each.id for each in leaving}
    # The suspension of one second ends.
    router.on_deadline(52.0)
    assert decide(router, "trial", text_of(512, "trial"), now=52.0).receipt.chosen == stays


def test_sleeping_member_is_left_for_one_that_leaves() -> None:
    router = PoolRouter(pool(2), epoch_s=EPOCH_S)
    sleeps, leaves = router.pool.members
    router.on_pool(50.0, noticed(router.pool, leave_at_s=150.0, only=leaves.id))
    router.on_profile(50.0, sleeps.id, EngineProfile(asleep=True))

    assert decide(router, "a", LONG, now=51.0).receipt.chosen == leaves.id
