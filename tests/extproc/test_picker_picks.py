"""Tests of the picker's choices: destinations for bodies, pools for models, session names, and rejections."""

import json
from dataclasses import replace

import pytest

from dualmap.engines.profile import EngineProfile
from dualmap.pools.pool import Engine, Prefix, Session
from dualmap.prompts.blocks import MAX_BLOCKS
from dualmap.router import PoolRouter
from dualmap_edge import logs
from dualmap_extproc.errors import Refused
from dualmap_extproc.request.body import may_go_on
from dualmap_extproc.request.observations import Rejected, Routed, RoutedBodiless
from dualmap_extproc.request.picked import Picked
from extproc.desks import Desk
from extproc.envoy_messages import chat, logging_as_it_was, pool


def test_pick_has_destination_cluster_id_and_receipt():
    desk = Desk()

    picked = desk.pick()

    (routed,) = desk.observer.events
    assert isinstance(routed, Routed)
    decision = routed.decision
    assert (routed.pool, routed.now, routed.queued_s) == ("llm/qwen", 10.0, None)
    assert picked == Picked(
        destination=decision.destination,
        cluster="llm/qwen",
        max_body_bytes=16 << 20,
        request_id=decision.request_id,
        receipt=decision.receipt.header(),
    )
    assert picked.request_id.startswith("r1-0-")


def test_pick_ids_are_never_repeated():
    desk = Desk()

    assert len({desk.pick().request_id for _ in range(50)}) == 50


def test_pick_by_model_name_or_alias_selects_its_pool():
    desk = Desk(pool("a", model="big", aliases=["b1", "b2"]), pool("c", model="small"))

    clusters = [desk.pick(chat(model=name)).cluster for name in ("big", "b1", "b2", "small")]

    assert clusters == ["llm/a", "llm/a", "llm/a", "llm/c"]
    assert desk.refused(chat(model="llm/a")) == 404


def test_pick_by_alias_shares_the_prefixes_of_the_model():
    desk = Desk(pool(aliases=["alias"]))
    text = "a long shared prefix " * 200
    desk.pick(chat(text))

    assert "matched=0" not in (desk.pick(chat(text, model="alias")).receipt or "")


@pytest.mark.parametrize("engine", [Engine(), Engine(max_model_len=4096)])
def test_pick_prompt_counts_at_most_max_model_len(engine):
    desk = Desk(replace(pool(), engine=engine))

    receipt = desk.pick(chat("x" * 1_000_000)).receipt

    assert f"prompt={engine.max_model_len}," in receipt
    assert sum(each.pending_prefill_tokens for each in desk.picker.statuses()[0].endpoints) == engine.max_model_len


def test_pick_prompt_is_indexed_up_to_the_most_blocks():
    small = pool()
    engine = Engine(max_model_len=10**8, cache_tokens=10**10)
    routing = replace(small.routing, prefix=Prefix(block_tokens=1, initial_blocks=1, max_blocks=1024))
    desk = Desk(replace(small, engine=engine, routing=routing))

    receipt = desk.pick(chat("x" * 1_000_000)).receipt

    tokens = int(receipt.partition("prompt=")[2].partition(",")[0])
    assert tokens > 250_000
    assert sum(each.indexed_blocks for each in desk.picker.statuses()[0].endpoints) == MAX_BLOCKS


def test_pick_by_adapter_selects_its_pool_and_shares_no_prefix():
    desk = Desk(pool("a", adapters=["sql", "law"]), pool("b", model="other"))
    text = "a long shared prefix " * 200
    desk.pick(chat(text))

    picked = [desk.pick(chat(text, model=name)) for name in ("sql", "law", "sql", "m")]

    assert {each.cluster for each in picked} == {"llm/a"}
    assert ["matched=0" in (each.receipt or "") for each in picked] == [True, True, False, False]


def test_pick_prefers_adapter_in_model_to_adapter_in_lora_path():
    desk = Desk(pool(adapters=["sql"]))
    text = "a long shared prefix " * 200
    desk.pick(chat(text, model="sql"))

    assert "matched=0" not in (desk.pick(chat(text, model="sql", lora_path="law")).receipt or "")


def test_pick_by_lora_path_prefers_members_with_the_adapter():
    desk = Desk(pool(members=4, adapters=["sql"]))
    for number in range(4):
        models = ("m", "sql") if number == 3 else ("m",)
        desk.picker.on_profile(0.0, "llm/qwen", f"qwen-{number}", EngineProfile(models=models))

    for fields in ({"lora_path": "sql"}, {"lora_request": {"lora_name": "sql", "lora_int_id": 1}}):
        receipts = {desk.pick(chat(f"text {number}", **fields)).receipt or "" for number in range(4)}
        assert all('chosen="qwen-3"' in each and 'adapter="loaded"' in each for each in receipts)
    assert "adapter=" not in (desk.pick(chat("text", lora_path="law")).receipt or "")


def test_pick_with_different_cache_salts_shares_no_prefix():
    desk = Desk()
    text = "a long shared prefix " * 200
    desk.pick(chat(text, cache_salt="one"))

    assert "matched=0" in (desk.pick(chat(text, cache_salt="two")).receipt or "")
    assert "matched=0" not in (desk.pick(chat(text, cache_salt="one")).receipt or "")


def test_pick_with_different_lora_adapters_shares_no_prefix():
    desk = Desk()
    text = "a long shared prefix " * 200
    desk.pick(chat(text, lora_path="one"))

    assert "matched=0" in (desk.pick(chat(text, lora_path="two")).receipt or "")
    assert "matched=0" not in (desk.pick(chat(text, lora_path="one")).receipt or "")


@pytest.mark.parametrize("streamed", [True, False])
def test_pick_reports_if_a_first_token_will_be_observed(monkeypatch, streamed):
    asked = []
    real = PoolRouter.on_request
    monkeypatch.setattr(PoolRouter, "on_request", lambda self, now, each: asked.append(each) or real(self, now, each))

    Desk().pick(chat(stream=streamed))

    assert [each.streamed for each in asked] == [streamed]


BODIES = [
    json.dumps({"model": "m", "n": [1, -2.5e-10, True, False, None, {"b": 'é\n\u2603\ud83d\ude00"\\'}], "": {}}),
    json.dumps({"prompt": "ünï😀", "nested": [[[]]], "x": 0}, ensure_ascii=False, indent=1),
    '\r\n\t {"model" : "m" }',
]


@pytest.mark.parametrize("body", BODIES)
def test_incomplete_body_can_continue_but_complete_body_cannot(body):
    whole = body.encode()

    assert [cut for cut in range(len(whole)) if not may_go_on(whole[:cut])] == []
    assert not may_go_on(whole)


@pytest.mark.parametrize(
    "body",
    [
        b"n",
        b"nope}",
        b"[",
        b'"',
        b"1",
        b'{"a": nope}',
        b"{a",
        b"{,",
        b'{"a" 1',
        b'{"a": 1} {',
        b"\xff",
        b"\xef\xbb\xbf{",
    ],
)
def test_invalid_start_of_a_body_cannot_continue(body):
    assert not may_go_on(body)


def test_model_name_in_two_pools_belongs_to_the_first():
    desk = Desk(pool("a", model="m"), pool("b", model="m", aliases=["other"]))

    assert desk.pick(chat(model="m")).cluster == "llm/a"
    assert desk.pick(chat(model="other")).cluster == "llm/b"


def test_changed_pools_keep_accounts_and_removed_pools_lose_them():
    desk = Desk(pool("a", model="a"), pool("b", model="b"))
    kept, lost = desk.pick(chat(model="a")), desk.pick(chat(model="b"))
    assert desk.in_flight == 2

    desk.picker.set_pools(11.0, (pool("a", model="a", members=6),))

    assert [each.id for each in desk.picker.pools] == ["llm/a"]
    assert desk.in_flight == 1
    assert desk.refused(chat(model="b")) == 404
    desk.picker.finished(12.0, lost.request_id, None)
    desk.picker.finished(12.0, kept.request_id, None)
    assert desk.in_flight == 0


@pytest.mark.parametrize(("model", "pools"), [("", ["full"]), ("f", ["empty", "full"])])
def test_pick_for_get_request_uses_the_only_pool_or_the_named_model(model, pools):
    made = {"empty": pool("empty", model="e", members=0), "full": pool("full", model="f")}
    desk = Desk(*(made[name] for name in pools))

    picked = desk.picker.pick_bodiless(1.0, None, model=model)

    assert isinstance(picked, Picked)
    assert (picked.cluster, picked.request_id, picked.receipt) == ("llm/full", "", None)
    assert desk.observer.events == [RoutedBodiless(now=1.0, pool="llm/full")]


@pytest.mark.parametrize(("model", "status"), [("", 404), ("unknown", 404), ("e", 503)])
def test_pick_get_without_a_pool_for_it_is_rejected(model, status):
    desk = Desk(pool("empty", model="e", members=0), pool("full", model="f"))

    refused = desk.picker.pick_bodiless(1.0, None, model=model)

    assert isinstance(refused, Refused)
    assert (refused.status, refused.pool) == (status, "")


def test_pick_reports_rejections_with_their_pool():
    desk = Desk(pool(members=0))

    desk.refused(chat())
    desk.refused(b"{}")
    desk.refused(chat(model="zz"))

    assert [(each.refused.status, each.pool) for each in desk.observer.of(Rejected)] == [
        (503, "llm/qwen"),
        (400, ""),
        (404, ""),
    ]


def test_pick_400_error_contains_the_field_name():
    refused = Desk().ask(b'{"model": 1}')

    assert isinstance(refused, Refused)
    assert refused.param == "model"


def test_pick_writes_the_receipt_to_the_debug_log(capsys):
    with logging_as_it_was():
        logs.configure(level="info", log_format="json")
        Desk().pick()
        logs.configure(level="debug", log_format="json")
        Desk().pick()

    (line,) = [line for line in capsys.readouterr().err.splitlines() if "candidates" in line]
    assert '"chosen"' in line
    assert "hello" not in line


def sessions(monkeypatch, desk: Desk, *asked) -> list[int | None]:
    """Send each (body, headers); return the sessions that the pool's router received."""
    seen = []
    real = PoolRouter.on_request
    monkeypatch.setattr(PoolRouter, "on_request", lambda self, now, each: seen.append(each) or real(self, now, each))
    for body, headers in asked:
        desk.ask(body, headers=headers)
    return [each.session for each in seen]


def test_session_header_takes_precedence_over_the_body(monkeypatch):
    desk = Desk(pool(session=Session(header="X-My-Session")))
    named = {"x-my-session": "one"}

    by_header, both, by_body, other, none, empty = sessions(
        monkeypatch,
        desk,
        (chat(), named),
        (chat(session_id="two"), named),
        (chat(session_id="one"), {}),
        (chat(session_id="two"), {}),
        (chat(), {}),
        (chat(session_id="one"), {"x-my-session": ""}),
    )

    assert desk.picker.kept_headers == {"x-my-session", "x-gateway-inference-fairness-id"}
    assert by_header is not None
    assert by_header == both == by_body == empty
    assert other not in (by_header, None)
    assert none is None


def test_sessions_are_separate_for_tenants_and_models(monkeypatch):
    desk = Desk(pool("a", model="a"), pool("b", model="b"))
    bodies = [chat(model="a"), chat(model="b"), chat(model="a", cache_salt="x"), chat(model="a", lora_path="y")]

    found = sessions(monkeypatch, desk, *((body, {"x-session-id": "same"}) for body in bodies))

    assert len(set(found)) == len(bodies)


@pytest.mark.parametrize(("length", "known"), [(1024, True), (1025, False), (1_000_000, False)])
@pytest.mark.parametrize("where", ["header", "body"])
def test_session_name_above_the_limit_is_ignored(monkeypatch, length, known, where):
    name = "s" * length
    asked = (chat(), {"x-session-id": name}) if where == "header" else (chat(session_id=name), {})

    assert [each is not None for each in sessions(monkeypatch, Desk(), asked)] == [known]


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"[" * 100_000, "the body is not JSON: depth limit exceeded"),
        (b'{"model": "m", "tools": ' + b"[" * 2000 + b"]" * 2000 + b"}", "the body is not JSON: depth limit exceeded"),
        # The parser accepts this body, but its nesting is too deep for the serializer.
        (b'{"model": "m", "tools": ' + b"[" * 1000 + b"]" * 1000 + b"}", "the body is nested too deeply"),
    ],
    ids=["unclosed", "parser", "spelling"],
)
def test_too_deeply_nested_body_is_a_bad_request(body, why):
    refused = Desk().ask(body)

    assert isinstance(refused, Refused)
    assert refused.status == 400
    assert refused.message.startswith(why)


def test_too_long_model_name_is_truncated():
    refused = Desk().ask(chat(model="m" * 1_000_000))

    assert isinstance(refused, Refused)
    assert (refused.status, len(refused.message) < 300) == (404, True)
