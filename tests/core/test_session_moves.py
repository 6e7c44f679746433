"""Tests of sessions that move: what the new member fetches from the old one, and what the receipt says."""

from dataclasses import replace

import pytest

from builders import NEVER_HOLD, pool, request, text_of
from dualmap.fleet.suspension import FAILURES_IN_A_ROW
from dualmap.keys.sessions import session_key
from dualmap.kv_store.view import StoreMatch
from dualmap.pools.kv_store import KvStore, StoreType
from dualmap.pools.pool import Engine, MemberState, Pool, Routing, Session, SessionMigration
from dualmap.prompts.blocks import chain_root
from dualmap.receipt import SessionHost
from dualmap.requests import Decision, Request
from dualmap.router import PoolRouter

NAME = session_key("conversation 7", chain_root(model="m"))
HELD = 8192
CHAT = text_of(HELD, "chat")
STORE = KvStore(type=StoreType.MOONCAKE, endpoint="http://127.0.0.1:9003")


def pulling(*, pull: bool = True, store: KvStore | None = None) -> Pool:
    session = Session(migration=SessionMigration(pull=pull))
    made = pool(4, routing=Routing(session=session, queue=NEVER_HOLD), engine=Engine(prefill_tokens_per_second=1000.0))
    return made if store is None else replace(made, kv_store=store)


def turn(id: str, *, now: float, text: str = CHAT, subset: frozenset[str] | None = None) -> Request:
    return request(id, text, now=now)._replace(session=NAME, subset=subset)


def decide(router: PoolRouter, asked: Request) -> Decision:
    outcome = router.on_request(asked.arrived_s, asked).answer
    assert isinstance(outcome, Decision), outcome
    return outcome


def with_host(pool: Pool) -> tuple[PoolRouter, str, str]:
    """Return a router whose member has computed a session's first turn, with the member and its endpoint."""
    router = PoolRouter(pool)
    decision = decide(router, turn("1", now=0.0))
    router.on_first_token(9.0, "1")
    router.on_finished(9.0, "1")
    return router, decision.receipt.chosen, decision.endpoints[0]


def elsewhere(router: PoolRouter, host: str) -> frozenset[str]:
    return frozenset(each.endpoint for each in router.pool.members if each.id != host)


def test_session_that_moves_fetches_what_its_host_holds() -> None:
    router, host, endpoint = with_host(pulling())

    receipt = decide(router, turn("2", now=10.0, text=CHAT + "and then?", subset=elsewhere(router, host))).receipt

    assert receipt.chosen != host
    assert (receipt.matched_tokens, receipt.fetch_tokens) == (0, HELD)
    assert (receipt.moved_from, receipt.kv_source) == (host, endpoint)
    # Computing the prompt takes 8 s.
    assert receipt.predicted_ttft_s < 1.0


def test_session_that_stays_fetches_nothing() -> None:
    router, host, _ = with_host(pulling())

    receipt = decide(router, turn("2", now=10.0, text=CHAT + "and then?")).receipt

    assert (receipt.chosen, receipt.matched_tokens, receipt.fetch_tokens) == (host, HELD, 0)
    assert (receipt.moved_from, receipt.kv_source) == ("", "")


def test_session_that_moves_in_a_pool_without_pull_computes_its_prompt_again() -> None:
    router, host, _ = with_host(pulling(pull=False))

    receipt = decide(router, turn("2", now=10.0, subset=elsewhere(router, host))).receipt

    assert (receipt.fetch_tokens, receipt.moved_from, receipt.kv_source) == (None, host, "")
    assert receipt.predicted_ttft_s > 5.0


def test_session_of_a_draining_host_fetches_from_it() -> None:
    router, host, endpoint = with_host(pulling())
    draining = [replace(each, state=MemberState.DRAINING) if each.id == host else each for each in router.pool.members]
    router.on_pool(9.5, replace(router.pool, members=tuple(draining)))

    receipt = decide(router, turn("2", now=10.0)).receipt

    assert receipt.kv_source == endpoint
    assert receipt.fetch_tokens == HELD - 1, "engines compute the last token"


def test_session_of_a_removed_host_computes_its_prompt_again() -> None:
    router, host, _ = with_host(pulling())
    left = tuple(each for each in router.pool.members if each.id != host)
    router.on_pool(9.5, replace(router.pool, members=left))

    receipt = decide(router, turn("2", now=10.0)).receipt

    assert (receipt.moved_from, receipt.kv_source, receipt.fetch_tokens) == (host, "", 0)


def test_session_of_a_suspended_host_does_not_fetch_from_it() -> None:
    router, host, endpoint = with_host(pulling())
    for number in range(FAILURES_IN_A_ROW):
        decide(router, request(f"failed {number}", "hello", now=9.5)._replace(subset=frozenset({endpoint})))
        router.on_failed(9.6, f"failed {number}")

    receipt = decide(router, turn("2", now=10.0)).receipt

    assert receipt.chosen != host
    assert (receipt.moved_from, receipt.kv_source, receipt.fetch_tokens) == (host, "", 0)


@pytest.mark.parametrize(("stored", "fetched"), [(1024, HELD - 1), (HELD * 2, HELD - 1)])
def test_store_and_host_offer_the_longer_prefix(stored: int, fetched: int) -> None:
    router, host, endpoint = with_host(pulling(store=STORE))
    asked = turn("2", now=10.0, subset=elsewhere(router, host))._replace(stored=StoreMatch(stored))

    receipt = decide(router, asked).receipt

    assert (receipt.fetch_tokens, receipt.kv_source) == (fetched, endpoint)


def test_store_alone_names_the_host_as_source() -> None:
    router, host, endpoint = with_host(pulling(pull=False, store=STORE))

    receipt = decide(router, turn("2", now=10.0, subset=elsewhere(router, host))).receipt

    assert (receipt.fetch_tokens, receipt.moved_from, receipt.kv_source) == (0, host, endpoint)


def test_new_session_moves_from_no_member() -> None:
    receipt = decide(PoolRouter(pulling()), turn("1", now=0.0)).receipt

    assert (receipt.host, receipt.moved_from) == (None, "")
    assert "moved_from" not in receipt.header()


def test_receipt_names_the_member_that_the_session_leaves() -> None:
    receipt = decide(PoolRouter(pulling()), turn("1", now=0.0)).receipt
    moved = receipt._replace(host=SessionHost('a"b', "10.0.0.9:8000"))
    stayed = receipt._replace(host=SessionHost(receipt.chosen, "10.0.0.9:8000"))

    assert ', moved_from="a\\"b"' in moved.header()
    assert moved.as_json()["moved_from"] == 'a"b'
    assert "moved_from" not in stayed.header()
    assert not {"moved_from", "host"} & stayed.as_json().keys()
