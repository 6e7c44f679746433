"""Tests of sessions: their keys, bindings, EAR's move rule, and agreement between replicas."""

from dataclasses import replace

import pytest

from builders import pool, request, text_of
from dualmap.keys.sessions import MAX_SESSIONS, SessionTable, session_key
from dualmap.pools.pool import Engine, MemberState, Pool, Queue, Routing, Session, SessionMigration
from dualmap.prompts.blocks import chain_root
from dualmap.replicas.update import SharedBinding
from dualmap.requests import Decision, Request
from dualmap.router import PoolRouter

NAME = session_key("conversation 7", chain_root(model="m"))


def turn(id: str, text: str, *, now: float = 0.0, session: int | None = NAME) -> Request:
    return request(id, text, now=now)._replace(session=session)


def decide(router: PoolRouter, asked: Request) -> Decision:
    outcome = router.on_request(asked.arrived_s, asked).answer
    assert isinstance(outcome, Decision), outcome
    return outcome


def migrating(*, enabled: bool = True, hot_ratio: float = 0.2, count: int = 8) -> Pool:
    session = Session(migration=SessionMigration(enabled=enabled, hot_ratio=hot_ratio, cooldown_s=30.0))
    routing = Routing(session=session, queue=Queue(dispatch_window_s=1e9))
    return pool(count, routing=routing, engine=Engine(prefill_tokens_per_second=1000.0))


def test_session_has_the_same_pair_for_any_prompt() -> None:
    router = PoolRouter(pool())
    decisions = [decide(router, turn(str(n), text_of(700, f"start {n}"))) for n in range(6)]
    assert len({each.receipt.pair for each in decisions}) == 1
    assert len({each.receipt.key.hash for each in decisions}) == 1


def test_sessions_with_equal_system_prompts_spread_over_members() -> None:
    router, system = PoolRouter(pool()), text_of(512, "system")
    pairs = {decide(router, turn(str(n), system, session=session_key(str(n), 1))).receipt.pair for n in range(50)}
    assert len(pairs) > 20


def test_session_with_another_salt_is_distinct() -> None:
    salted = session_key("conversation 7", chain_root(model="m", cache_salt="tenant"))
    assert salted != NAME


def test_session_sets_the_key_of_a_prompt_without_text() -> None:
    router = PoolRouter(pool())
    assert decide(router, turn("1", "")).receipt.pair == decide(router, turn("2", "")).receipt.pair


def test_hot_session_gets_longer_keys_than_its_first_key() -> None:
    router, keys = PoolRouter(pool()), set()
    for n in range(120):
        asked = turn(str(n), text_of(1024, "agent") + text_of(512, f"branch {n % 12}"), now=n * 0.1)
        keys.add(decide(router, asked).receipt.key)
        router.on_finished(n * 0.1, str(n))
    assert max(key.blocks for key in keys) > 2
    plain = PoolRouter(pool())
    assert decide(plain, turn("1", text_of(1024, "agent"), session=None)).receipt.key.hash not in {k.hash for k in keys}


class TestBinding:
    def test_session_binding_to_host_outside_the_pair_is_used(self) -> None:
        router = PoolRouter(pool())
        first = decide(router, turn("1", text_of(2048, "chat")))
        outsider = next(each for each in router.pool.members if each.id not in first.receipt.pair)
        router.on_served(0.1, "1", outsider.endpoint)
        router.on_finished(1.0, "1")
        moved = SharedBinding(session=NAME, host=outsider.id, tokens=2048, version=5, moved_ago_s=0.0)
        router.on_bindings(1.0, [moved])
        second = decide(router, turn("2", text_of(2048, "chat") + "and then?", now=2.0))
        assert (second.receipt.chosen, second.receipt.rule) == (outsider.id, "host-warm")
        assert second.receipt.matched_tokens == 2048

    def test_session_binding_from_the_store_predicts_cached_context(self) -> None:
        cold = PoolRouter(pool(), replicated=True)
        pair = decide(cold, turn("0", text_of(2048, "chat"))).receipt.pair
        cold = PoolRouter(pool(), replicated=True)
        router_says = SharedBinding(session=NAME, host=pair[1], tokens=2048, version=0, moved_ago_s=9.0)
        cold.on_bindings(0.0, [router_says])
        decision = decide(cold, turn("1", text_of(2048, "chat") + text_of(100, "more")))
        assert (decision.receipt.chosen, decision.receipt.matched_tokens) == (pair[1], 2048)

    def test_turn_before_the_store_response_counts_as_session_move(self) -> None:
        table = SessionTable(100.0, replicated=True)
        assert table.get(0.0, 1) is None
        table.bind(0.0, 1, host="mine", tokens=9)
        (claim,) = table.take_changes(0.1)
        assert claim.version == 0
        table.adopt(0.2, SharedBinding(session=1, host="theirs", tokens=5, version=3, moved_ago_s=60.0), hinted=True)
        known = table.get(0.2, 1)
        assert known is not None
        assert known.host == "mine"
        (claim,) = table.take_changes(0.3)
        assert (claim.host, claim.version) == ("mine", 4)
        table.adopt(0.4, SharedBinding(session=1, host="third", tokens=5, version=4, moved_ago_s=0.0), hinted=True)
        known = table.get(0.4, 1)
        assert known is not None
        assert known.host == "third", "whoever was first with a version holds it"

    def test_local_turn_takes_precedence_over_late_store_response(self) -> None:
        cold = PoolRouter(migrating(), replicated=True)
        first = decide(cold, turn("1", text_of(2048, "chat"))).receipt.chosen
        cold.on_first_token(1.0, "1")
        cold.on_finished(2.0, "1")
        stale = next(each.id for each in cold.pool.members if each.id != first)
        cold.on_bindings(0.2, [SharedBinding(session=NAME, host=stale, tokens=1024, version=0, moved_ago_s=9.0)])
        second = decide(cold, turn("2", text_of(2048, "chat") + "and?", now=3.0))
        assert (second.receipt.chosen, second.receipt.matched_tokens) == (first, 2048)

    def test_session_of_a_draining_host_moves_at_the_next_turn(self) -> None:
        router = PoolRouter(migrating())
        first = decide(router, turn("1", text_of(2048, "chat")))
        host = first.receipt.chosen
        members = tuple(
            replace(each, state=MemberState.DRAINING) if each.id == host else each for each in router.pool.members
        )
        router.on_pool(1.0, replace(router.pool, members=members))
        second = decide(router, turn("2", text_of(2048, "chat"), now=2.0))
        assert second.receipt.chosen != host
        third = decide(router, turn("3", text_of(2048, "chat"), now=3.0))
        assert third.receipt.chosen == second.receipt.chosen

    def test_session_binding_expires_after_its_ttl(self) -> None:
        table = SessionTable(10.0, replicated=True)
        table.bind(0.0, 1, host="a", tokens=5)
        assert table.get(10.0, 1) is not None
        assert table.get(10.1, 1) is None
        table.bind(10.2, 2, host="a", tokens=5)
        assert len(table) == 1

    def test_session_table_is_bounded(self) -> None:
        table = SessionTable(1e9, replicated=False)
        for session in range(MAX_SESSIONS + 10):
            table.bind(0.0, session, host="a", tokens=5)
        assert len(table) == MAX_SESSIONS
        assert table.get(0.0, 5) is None
        assert table.get(0.0, 10) is not None
        assert table.take_changes(0.0) == ()
        assert table.take_wanted() == ()

    def test_session_binding_version_counts_only_moves(self) -> None:
        table = SessionTable(100.0, replicated=True)
        table.bind(0.0, 1, host="a", tokens=5)
        table.bind(1.0, 1, host="a", tokens=9)
        (change,) = table.take_changes(1.0)
        assert (change.version, change.tokens, change.moved_ago_s) == (0, 9, 1.0)
        table.bind(2.0, 1, host="b", tokens=12)
        (change,) = table.take_changes(5.0)
        assert (change.host, change.version, change.moved_ago_s) == ("b", 1, 3.0)
        assert table.take_changes(5.0) == ()

    def test_session_binding_with_higher_version_is_kept(self) -> None:
        table = SessionTable(100.0, replicated=True)
        table.bind(0.0, 1, host="a", tokens=5)
        table.bind(0.0, 1, host="b", tokens=5)
        table.adopt(1.0, SharedBinding(session=1, host="c", tokens=5, version=0, moved_ago_s=0.0), hinted=False)
        known = table.get(1.0, 1)
        assert known is not None
        assert known.host == "b"
        table.adopt(1.0, SharedBinding(session=1, host="c", tokens=5, version=1, moved_ago_s=0.0), hinted=False)
        known = table.get(1.0, 1)
        assert known is not None
        assert known.host == "c"
        assert table.take_changes(1.0) == (), "what the store says need not be told to it"

    def test_unknown_session_is_looked_up_once(self) -> None:
        table = SessionTable(100.0, replicated=True)
        table.get(0.0, 1)
        table.get(0.0, 1)
        assert table.take_wanted() == (1,)
        assert table.take_wanted() == ()


class TestMigration:
    def hot_host(self, *, enabled: bool = True, hot_ratio: float = 0.2) -> tuple[PoolRouter, str]:
        """Return a session whose member has 40 s of prefill from other requests, while all other members are idle."""
        router = PoolRouter(migrating(enabled=enabled, hot_ratio=hot_ratio))
        host = decide(router, turn("1", text_of(2048, "chat"))).receipt.chosen
        router.on_first_token(2.0, "1")
        router.on_finished(2.0, "1")
        endpoint = next(each.endpoint for each in router.pool.members if each.id == host)
        for n in range(10):
            other = request(f"other {n}", text_of(4000, f"other {n}"), now=2.0)._replace(subset=frozenset({endpoint}))
            decide(router, other)
        return router, host

    def test_session_stays_while_its_host_is_not_hot(self) -> None:
        router = PoolRouter(migrating())
        host = decide(router, turn("1", text_of(2048, "chat"))).receipt.chosen
        second = decide(router, turn("2", text_of(2048, "chat"), now=5.0))
        assert (second.receipt.chosen, second.receipt.rule) == (host, "session-host")

    def test_session_migrates_from_a_hot_host_and_stays(self) -> None:
        router, host = self.hot_host()
        second = decide(router, turn("2", text_of(2048, "chat"), now=3.0))
        assert second.receipt.rule == "session-move"
        assert second.receipt.chosen != host
        third = decide(router, turn("3", text_of(2048, "chat"), now=4.0))
        assert (third.receipt.chosen, third.receipt.rule) == (second.receipt.chosen, "session-host")

    def test_session_migration_cooldown_prevents_a_second_move(self) -> None:
        router, _ = self.hot_host()
        second = decide(router, turn("2", text_of(2048, "chat"), now=3.0)).receipt.chosen
        endpoint = next(each.endpoint for each in router.pool.members if each.id == second)
        for n in range(10):
            crowd = request(f"crowd {n}", text_of(4000, f"crowd {n}"), now=4.0)._replace(subset=frozenset({endpoint}))
            decide(router, crowd)
        assert decide(router, turn("3", text_of(2048, "chat"), now=5.0)).receipt.rule == "session-host"
        assert decide(router, turn("4", text_of(2048, "chat"), now=33.0)).receipt.rule == "session-move"

    def test_session_stays_if_all_members_are_loaded(self) -> None:
        router, host = self.hot_host(hot_ratio=0.0)
        assert decide(router, turn("2", text_of(2048, "chat"), now=3.0)).receipt.chosen == host

    def test_session_stays_if_no_member_has_free_memory(self) -> None:
        router, host = self.hot_host()
        engine = replace(router.pool.engine, cache_tokens=1000)
        router.on_pool(2.5, replace(router.pool, engine=engine))
        assert decide(router, turn("2", text_of(2048, "chat"), now=3.0)).receipt.chosen == host

    def test_disabled_session_migration_uses_the_policy(self) -> None:
        router, host = self.hot_host(enabled=False)
        second = decide(router, turn("2", text_of(2048, "chat"), now=3.0))
        assert second.receipt.chosen != host
        assert second.receipt.rule in {"spill", "pair-marginal"}


@pytest.mark.parametrize("field", ["session_id", "prompt_cache_key", "user"])
def test_session_name_is_read_from_the_body(field: str) -> None:
    from dualmap.prompts.prompt import read_prompt

    assert read_prompt({"model": "m", "prompt": "x", field: "abc"}).session == "abc"
    assert read_prompt({"model": "m", "prompt": "x", field: 7}).session == ""
    assert read_prompt({"model": "m", "prompt": "x", field: "last", "session_id": "first"}).session == "first"
