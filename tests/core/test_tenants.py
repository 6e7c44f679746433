"""Tests that tenants with different values of ``cache_salt`` share no cached blocks."""

from dataclasses import replace

from builders import chain, pool, text_of
from dualmap.keys.sessions import session_key
from dualmap.prompts.blocks import chain_root
from dualmap.requests import Decision, Request
from dualmap.router import PoolRouter

TEXT = text_of(2048, "the same words")


def ask(router: PoolRouter, id: str, *, salt: str, session: str | None = None, now: float = 0.0) -> Decision:
    name = None if session is None else session_key(session, chain_root(model="m", cache_salt=salt))
    outcome = router.on_request(now, Request(id=id, chain=chain(TEXT, salt=salt), arrived_s=now, session=name)).answer
    assert isinstance(outcome, Decision)
    return outcome


def test_tenant_prefix_is_not_cached_for_other_tenants() -> None:
    router = PoolRouter(pool(1))
    assert ask(router, "1", salt="a").receipt.matched_tokens == 0
    assert ask(router, "2", salt="b").receipt.matched_tokens == 0
    assert ask(router, "3", salt="").receipt.matched_tokens == 0
    assert ask(router, "4", salt="a").receipt.matched_tokens == 2048


def test_tenant_hotness_does_not_lengthen_keys_of_other_tenants() -> None:
    router = PoolRouter(pool(8))
    for n in range(200):
        hot = ask(router, str(n), salt="hot", now=n * 0.01)
        router.on_finished(n * 0.01, str(n))
    assert hot.receipt.key.blocks > 2
    assert ask(router, "other", salt="calm", now=2.0).receipt.key.blocks == 2


def test_tenants_with_equal_session_names_have_distinct_sessions() -> None:
    router = PoolRouter(pool(8), replicated=True)
    first = ask(router, "1", salt="a", session="chat")
    second = ask(router, "2", salt="b", session="chat")
    assert first.receipt.key.hash != second.receipt.key.hash
    assert len(router.take_update(0.0).bindings) == 2
    assert router.status().sessions == 2


def test_receipt_separates_tenants_without_showing_the_salt() -> None:
    router = PoolRouter(pool(8))
    receipts = [ask(router, salt, salt=salt).receipt for salt in ("secret-one", "secret-two")]
    assert receipts[0].key.hash != receipts[1].key.hash
    for receipt in receipts:
        assert "secret" not in receipt.header()
        assert "secret" not in str(receipt.as_json())


def test_replication_updates_separate_tenants() -> None:
    speaker, listener = PoolRouter(pool(1), replicated=True), PoolRouter(pool(1), replicated=True)
    ask(speaker, "1", salt="a")
    listener.on_update(0.1, "speaker", speaker.take_update(0.1), 0.0)
    assert ask(listener, "2", salt="b", now=0.2).receipt.matched_tokens == 0
    assert ask(listener, "3", salt="a", now=0.2).receipt.matched_tokens == 2048


def test_changed_pool_settings_keep_tenants_separate() -> None:
    router = PoolRouter(pool(1))
    ask(router, "1", salt="a")
    router.on_pool(1.0, replace(pool(1), ring_version=2))
    assert ask(router, "2", salt="a", now=1.0).receipt.matched_tokens == 2048
