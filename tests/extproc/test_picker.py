"""The picker: bodies to destinations, pools to models, and the books at every ending."""

import json

import pytest

from dualmap.pool import Session
from dualmap.requests import Usage
from dualmap.router import PoolRouter
from dualmap_edge import logs
from dualmap_extproc.access_log import AccessLogEntry
from dualmap_extproc.body import may_go_on
from dualmap_extproc.errors import Refused
from dualmap_extproc.picker import Picked, Picker, Waiting
from dualmap_extproc.settings import Limits
from extproc.envoy_messages import Recorder, chat, crowded_pool, logging_as_it_was, pool

SHORT = chat()


class Desk:
    """A picker, its observer, and a short way to ask it."""

    def __init__(self, *pools, limits: Limits | None = None) -> None:
        self.observer = Recorder()
        self.resumed: list[Picked | Refused] = []
        self.picker = Picker(limits or Limits(), self.observer, id_prefix="r1")
        self.picker.set_pools(0.0, pools or (pool(),))

    def ask(self, body: bytes = chat(), *, now=10.0, subset=None, headers=None) -> Picked | Refused | Waiting:
        return self.picker.pick(now, body, subset, now, headers=headers or {}, resume=self.resumed.append)

    def pick(self, body: bytes = chat(), *, now=10.0) -> Picked:
        picked = self.ask(body, now=now)
        assert isinstance(picked, Picked)
        return picked

    def refused(self, body: bytes) -> int:
        refused = self.ask(body)
        assert isinstance(refused, Refused)
        return refused.status

    @property
    def in_flight(self) -> int:
        return sum(each.in_flight for status in self.picker.statuses() for each in status.endpoints)


def test_a_pick_names_destination_cluster_id_and_receipt():
    desk = Desk()

    picked = desk.pick()

    (routed,) = desk.observer.events
    decision = routed[2]
    assert routed[:2] == ("routed", "llm/qwen")
    assert picked == Picked(
        destination=decision.destination,
        cluster="llm/qwen",
        request_id="r1-0",
        receipt=decision.receipt.header(),
    )


def test_ids_are_never_given_twice():
    desk = Desk()

    assert len({desk.pick().request_id for _ in range(50)}) == 50


def test_names_and_aliases_of_all_pools_lead_to_their_pool():
    desk = Desk(pool("a", model="big", aliases=["b1", "b2"]), pool("c", model="small"))

    clusters = [desk.pick(chat(model=name)).cluster for name in ("big", "b1", "b2", "small")]

    assert clusters == ["llm/a", "llm/a", "llm/a", "llm/c"]
    assert desk.refused(chat(model="llm/a")) == 404


def test_an_alias_shares_the_models_prefixes():
    desk = Desk(pool(aliases=["alias"]))
    text = "a long shared prefix " * 200
    desk.pick(chat(text))

    assert "matched=0" not in (desk.pick(chat(text, model="alias")).receipt or "")


def test_nothing_matches_across_cache_salts():
    desk = Desk()
    text = "a long shared prefix " * 200
    desk.pick(chat(text, cache_salt="one"))

    assert "matched=0" in (desk.pick(chat(text, cache_salt="two")).receipt or "")
    assert "matched=0" not in (desk.pick(chat(text, cache_salt="one")).receipt or "")


def test_nothing_matches_across_lora_adapters():
    desk = Desk()
    text = "a long shared prefix " * 200
    desk.pick(chat(text, lora_path="one"))

    assert "matched=0" in (desk.pick(chat(text, lora_path="two")).receipt or "")
    assert "matched=0" not in (desk.pick(chat(text, lora_path="one")).receipt or "")


@pytest.mark.parametrize("streamed", [True, False])
def test_the_pools_router_learns_whether_the_first_token_will_be_seen(monkeypatch, streamed):
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
def test_every_beginning_of_a_body_may_go_on_and_the_whole_may_not(body):
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
def test_what_no_bytes_can_complete_may_not_go_on(body):
    assert not may_go_on(body)


def test_the_first_of_two_pools_that_name_one_model_keeps_it():
    desk = Desk(pool("a", model="m"), pool("b", model="m", aliases=["other"]))

    assert desk.pick(chat(model="m")).cluster == "llm/a"
    assert desk.pick(chat(model="other")).cluster == "llm/b"


def test_a_pool_that_changes_keeps_its_books_and_one_that_goes_loses_them():
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


def test_a_get_goes_to_the_first_pool_that_has_a_member():
    desk = Desk(pool("empty", model="e", members=0), pool("full", model="f"))

    picked = desk.picker.pick_bodiless(None)

    assert isinstance(picked, Picked)
    assert (picked.cluster, picked.request_id, picked.receipt) == ("llm/full", "", None)
    assert desk.observer.events == [("routed_bodiless", "llm/full")]


def test_refusals_are_reported_with_their_pool_where_there_is_one():
    desk = Desk(pool(members=0))

    desk.refused(chat())
    desk.refused(b"{}")
    desk.refused(chat(model="zz"))

    assert [(event[1].status, event[1].pool) for event in desk.observer.events] == [
        (503, "llm/qwen"),
        (400, ""),
        (404, ""),
    ]


def test_the_reason_of_a_400_names_the_field():
    refused = Desk().ask(b'{"model": 1}')

    assert isinstance(refused, Refused)
    assert refused.param == "model"


def test_the_first_token_is_reported_once():
    desk = Desk()
    picked = desk.pick()

    desk.picker.first_token(12.0, picked.request_id)
    desk.picker.first_token(13.0, picked.request_id)

    assert desk.observer.names() == ["routed", "first_token"]


@pytest.mark.parametrize("end", ["finished", "rejected", "aborted", "failed"])
def test_a_request_ends_once(end):
    desk = Desk()
    picked = desk.pick()
    getattr(desk.picker, end)(12.0, picked.request_id, *([None] if end == "finished" else []))

    desk.picker.finished(13.0, picked.request_id, None)
    desk.picker.aborted(13.0, picked.request_id)

    assert desk.observer.names() == ["routed", end]
    assert desk.in_flight == 0


def entry(picked: Picked, **fields) -> AccessLogEntry:
    return AccessLogEntry(request_id=picked.request_id, **({"status": 200} | fields))


def test_the_access_log_ends_a_request_and_brings_its_usage():
    desk = Desk()
    picked = desk.pick()

    desk.picker.access_log(12.0, entry(picked, usage=Usage(cached_tokens=7)))

    assert desk.observer.names() == ["routed", "finished", "measured"]
    assert desk.observer.events[-1][2].measured_cached_tokens == 7
    assert desk.in_flight == 0


def test_usage_that_comes_after_the_end_is_still_measured_once():
    desk = Desk()
    picked = desk.pick()
    desk.picker.finished(12.0, picked.request_id, None)

    desk.picker.access_log(12.1, entry(picked, usage=Usage(cached_tokens=7)))
    desk.picker.access_log(12.2, entry(picked, usage=Usage(cached_tokens=7)))

    assert desk.observer.names() == ["routed", "finished", "measured"]
    assert desk.observer.events[-1][1:] == ("llm/qwen", desk.observer.events[-1][2])
    assert desk.observer.events[-1][2].measured_cached_tokens == 7


def test_only_so_many_ended_requests_are_remembered():
    desk = Desk(limits=Limits(ended_requests=2))
    picks = [desk.pick() for _ in range(3)]
    for picked in picks:
        desk.picker.finished(12.0, picked.request_id, None)

    for picked in picks:
        desk.picker.access_log(13.0, entry(picked, usage=Usage(cached_tokens=1)))

    assert desk.observer.names().count("measured") == 2


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({"status": 429}, "aborted"),
        ({"status": None}, "aborted"),
        ({"flags": ("downstream_connection_termination",)}, "aborted"),
        ({"flags": ("downstream_connection_termination", "upstream_remote_reset")}, "aborted"),
        ({"status": 503, "flags": ("upstream_overflow",)}, "aborted"),
        ({"status": 500}, "failed"),
        ({"status": 503, "flags": ("upstream_connection_failure",)}, "failed"),
        ({"status": 200, "flags": ("upstream_connection_termination",)}, "failed"),
    ],
)
def test_the_access_log_tells_who_broke_it_off(fields, end):
    desk = Desk()
    picked = desk.pick()

    desk.picker.access_log(12.0, entry(picked, **fields))

    assert desk.observer.names() == ["routed", end]
    assert desk.in_flight == 0


@pytest.mark.parametrize("status", [400, 404, 422])
def test_a_request_the_engine_rejects_is_no_abort_and_leaves_no_prefix_behind(status):
    desk = Desk()
    text = "a long shared prefix " * 200
    picked = desk.pick(chat(text))

    desk.picker.access_log(12.0, entry(picked, status=status))

    assert desk.observer.names() == ["routed", "rejected"]
    assert desk.in_flight == 0
    assert "matched=0" in (desk.pick(chat(text)).receipt or "")


def test_usage_counts_though_the_client_closed_as_soon_as_it_had_the_answer():
    desk = Desk()
    picked = desk.pick()
    desk.picker.finished(12.0, picked.request_id, None)

    gone = {"flags": ("downstream_connection_termination",)}
    desk.picker.access_log(12.1, entry(picked, usage=Usage(cached_tokens=7), **gone))

    assert desk.observer.names() == ["routed", "finished", "measured"]
    assert desk.observer.events[-1][2].measured_cached_tokens == 7


def test_the_access_log_reports_another_server_than_the_chosen_one():
    desk = Desk()
    picked = desk.pick()
    other = picked.destination.split(",")[1]

    desk.picker.access_log(12.0, entry(picked, served_endpoint=other))

    assert desk.observer.names() == ["routed", "served_elsewhere", "finished"]


def test_other_routers_entries_are_nobodys_business():
    desk = Desk()
    desk.pick()

    desk.picker.access_log(12.0, AccessLogEntry(request_id="another-0", status=200, served_endpoint="1.2.3.4:5"))

    assert desk.observer.names() == ["routed"]
    assert desk.in_flight == 1


def test_requests_that_nothing_is_heard_of_expire():
    desk = Desk(pool("a", model="a"), pool("b", model="b"))
    assert desk.picker.next_deadline() is None
    desk.pick(chat(model="b"), now=20.0)
    desk.pick(chat(model="a"), now=30.0)

    first = desk.picker.next_deadline()
    assert first is not None
    desk.picker.on_deadline(first)
    assert (desk.observer.names().count("expired"), desk.in_flight) == (1, 1)
    second = desk.picker.next_deadline()
    assert second == pytest.approx(first + 10.0)
    desk.picker.on_deadline(second)

    assert desk.in_flight == 0
    assert desk.picker.next_deadline() is None


def test_the_whole_receipt_goes_to_the_debug_log(capsys):
    with logging_as_it_was():
        logs.configure(level="info", log_format="json")
        Desk().pick()
        logs.configure(level="debug", log_format="json")
        Desk().pick()

    (line,) = [line for line in capsys.readouterr().err.splitlines() if "candidates" in line]
    assert '"chosen"' in line
    assert "hello" not in line


# Two minutes of prefill for the engine of a crowded pool.
LONG = chat("long " * 10_000)


class Queue(Desk):
    """A desk whose only engine is busy; what is asked for now waits."""

    def __init__(self, *pools, **queue) -> None:
        super().__init__(*(pools or (crowded_pool(**queue),)))
        self.first = self.pick(LONG)

    def hold(self, body: bytes = SHORT, *, now=10.0, resume=None) -> str:
        outcome = self.picker.pick(now, body, None, now, headers={}, resume=resume or self.resumed.append)
        assert isinstance(outcome, Waiting)
        return outcome.request_id

    @property
    def held(self) -> int:
        return sum(status.held for status in self.picker.statuses())

    def ids_resumed(self) -> list[str]:
        assert all(isinstance(each, Picked) for each in self.resumed)
        return [each.request_id for each in self.resumed]


@pytest.mark.parametrize(
    "event",
    [
        lambda picker, first: picker.first_token(12.0, first),
        lambda picker, first: picker.finished(12.0, first, None),
        lambda picker, first: picker.rejected(12.0, first),
        lambda picker, first: picker.aborted(12.0, first),
        lambda picker, first: picker.failed(12.0, first),
        lambda picker, first: picker.access_log(12.0, AccessLogEntry(request_id=first, status=200)),
        lambda picker, _: picker.on_deadline(10.0 + 600.0),
        lambda picker, _: picker.hold_no_more(12.0),
        lambda picker, _: picker.set_pools(12.0, (crowded_pool(dispatch_window_s=1000.0),)),
    ],
    ids=["first_token", "finished", "rejected", "aborted", "failed", "access_log", "deadline", "hold_no_more", "pools"],
)
def test_whatever_makes_room_resumes_who_waits_once(event):
    desk = Queue(max_wait_s=10_000.0)
    waiting = desk.hold()
    assert desk.resumed == []

    event(desk.picker, desk.first.request_id)
    event(desk.picker, desk.first.request_id)

    assert desk.ids_resumed() == [waiting]
    assert desk.held == 0
    assert desk.observer.names().count("routed") == 2
    assert desk.observer.names().count("waited") == 1


def test_a_request_that_makes_another_move_does_not_lose_it():
    """Room that comes by time alone is first seen when somebody else asks."""
    desk = Queue(dispatch_window_s=1.0)
    waiting = desk.hold()

    later = desk.pick(now=10_000.0)

    assert desk.ids_resumed() == [waiting]
    assert later.request_id != waiting


def test_held_requests_are_resumed_in_the_order_they_came():
    desk = Queue(dispatch_window_s=1.0)
    waiting = [desk.hold() for _ in range(5)]

    desk.picker.first_token(12.0, desk.first.request_id)

    assert desk.ids_resumed() == waiting


def test_who_is_resumed_may_come_back_to_the_picker_at_once():
    """The next one in turn is given up from within the resumption of the one before: it is never resumed."""
    desk = Queue(dispatch_window_s=1.0)
    asked_again = []
    others: list[str] = []

    def resume(picked) -> None:
        desk.picker.aborted(12.0, others[0])
        desk.picker.finished(12.0, picked.request_id, None)
        asked_again.append(desk.pick(now=12.0))

    desk.hold(resume=resume)
    others += [desk.hold(), desk.hold()]

    desk.picker.first_token(12.0, desk.first.request_id)

    assert desk.ids_resumed() == others[1:]
    assert len(asked_again) == 1
    names = desk.observer.names()
    assert (names.count("routed"), names.count("aborted"), names.count("finished")) == (5, 1, 1)
    assert names.count("waited") == 3
    assert desk.in_flight == 3


def test_an_outcome_that_comes_with_the_hold_is_the_answer(monkeypatch):
    desk = Queue()
    real = PoolRouter.on_request

    def on_request(self, now, request):
        held = real(self, now, request)
        self.on_first_token(now, desk.first.request_id)
        return held

    monkeypatch.setattr(PoolRouter, "on_request", on_request)

    assert isinstance(desk.ask(), Picked)
    assert desk.resumed == []


def test_who_gives_up_is_never_resumed():
    desk = Queue()
    waiting = desk.hold()

    desk.picker.aborted(11.0, waiting)
    desk.picker.aborted(11.0, waiting)
    desk.picker.first_token(12.0, desk.first.request_id)

    assert desk.resumed == []
    assert desk.observer.names() == ["routed", "waited", "first_token"]
    assert desk.observer.events[1][1:] == ("llm/qwen", 1.0)


def test_who_waits_in_a_pool_that_goes_is_refused():
    desk = Queue(crowded_pool(), pool("other", model="o"))
    desk.hold()

    desk.picker.set_pools(12.0, (pool("other", model="o"),))

    (refused,) = desk.resumed
    assert isinstance(refused, Refused)
    assert (refused.status, refused.code, refused.pool) == (503, "no_endpoint", "llm/qwen")
    assert desk.observer.names() == ["routed", "refused", "waited"]
    assert desk.picker.next_deadline() is None


def test_who_waits_too_long_is_told_when_to_come_back_in_whole_seconds():
    desk = Queue(max_wait_s=30.0)
    desk.hold(now=10.0)

    desk.picker.on_deadline(39.0)
    assert desk.resumed == []
    desk.picker.on_deadline(40.0)

    (refused,) = desk.resumed
    assert isinstance(refused, Refused)
    assert (refused.status, refused.code) == (429, "waited_too_long")
    assert isinstance(refused.retry_after_s, int)
    assert refused.retry_after_s >= 1


def test_the_first_member_takes_who_waited_for_it():
    desk = Desk(crowded_pool(members=0, hold_when_empty=True))
    outcome = desk.ask()
    assert isinstance(outcome, Waiting)

    desk.picker.set_pools(12.0, (crowded_pool(members=2, hold_when_empty=True),))

    (picked,) = desk.resumed
    assert isinstance(picked, Picked)
    assert picked.request_id == outcome.request_id


def test_once_nothing_is_held_nothing_is_again():
    desk = Queue(crowded_pool(hold_when_empty=True), crowded_pool("empty", members=0, hold_when_empty=True))
    desk.picker.hold_no_more(11.0)

    assert isinstance(desk.ask(), Picked)
    desk.picker.set_pools(12.0, (crowded_pool(members=0, hold_when_empty=True),))
    refused = desk.ask()
    assert isinstance(refused, Refused)
    assert refused.status == 503
    desk.picker.set_pools(13.0, (crowded_pool(members=1),))
    assert isinstance(desk.ask(), Picked)


def test_who_waits_for_a_first_member_is_told_when_the_router_ends():
    desk = Desk(crowded_pool(members=0, hold_when_empty=True))
    assert isinstance(desk.ask(), Waiting)

    desk.picker.hold_no_more(11.0)

    (refused,) = desk.resumed
    assert isinstance(refused, Refused)
    assert refused.status == 503


def test_the_first_request_that_is_held_is_announced_with_its_deadline():
    desk = Queue(max_wait_s=50.0)
    announced: list[float | None] = []
    desk.picker.on_first_held(lambda: announced.append(desk.picker.next_deadline()))
    assert not desk.picker.holding
    assert desk.picker.next_deadline() == pytest.approx(10.0 + 600.0)

    waiting = [desk.hold(now=11.0), desk.hold(now=12.0)]
    assert desk.picker.holding
    for request_id in waiting:
        desk.picker.aborted(13.0, request_id)
    assert not desk.picker.holding
    desk.hold(now=14.0)

    assert announced == [pytest.approx(61.0), pytest.approx(64.0)]


@pytest.mark.parametrize("status", [None, 200, 400, 503])
def test_an_entry_that_names_a_held_request_is_none_of_envoys(status):
    desk = Queue()
    waiting = desk.hold()

    desk.picker.access_log(12.0, AccessLogEntry(request_id=waiting, status=status))

    assert desk.held == 1
    desk.picker.first_token(12.0, desk.first.request_id)
    assert desk.ids_resumed() == [waiting]


def sessions(monkeypatch, desk: Desk, *asked) -> list[int | None]:
    """Ask for each (body, headers); return the sessions that the pool's router was told of."""
    seen = []
    real = PoolRouter.on_request
    monkeypatch.setattr(PoolRouter, "on_request", lambda self, now, each: seen.append(each) or real(self, now, each))
    for body, headers in asked:
        desk.ask(body, headers=headers)
    return [each.session for each in seen]


def test_a_session_is_named_by_the_header_before_the_body(monkeypatch):
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

    assert desk.picker.session_headers == {"x-my-session"}
    assert by_header is not None
    assert by_header == both == by_body == empty
    assert other not in (by_header, None)
    assert none is None


def test_tenants_and_models_never_share_a_session(monkeypatch):
    desk = Desk(pool("a", model="a"), pool("b", model="b"))
    bodies = [chat(model="a"), chat(model="b"), chat(model="a", cache_salt="x"), chat(model="a", lora_path="y")]

    found = sessions(monkeypatch, desk, *((body, {"x-session-id": "same"}) for body in bodies))

    assert len(set(found)) == len(bodies)


@pytest.mark.parametrize(("length", "known"), [(1024, True), (1025, False), (1_000_000, False)])
@pytest.mark.parametrize("where", ["header", "body"])
def test_an_endless_session_name_names_none(monkeypatch, length, known, where):
    name = "s" * length
    asked = (chat(), {"x-session-id": name}) if where == "header" else (chat(session_id=name), {})

    assert [each is not None for each in sessions(monkeypatch, Desk(), asked)] == [known]


def test_news_goes_to_its_pool_and_may_make_room():
    desk = Queue(crowded_pool(), pool("other", model="o"))
    teller = Desk(crowded_pool(), pool("other", model="o"))
    waiting = desk.hold()
    told = dict(teller.picker.take_news(11.0))
    assert told.keys() == {"llm/qwen", "llm/other"}

    # Two minutes later the prefill that is waited for should have ended, which is seen when anything is told.
    desk.picker.on_news(10_000.0, "llm/qwen", "teller", told["llm/qwen"], 0.0)
    desk.picker.on_news(10_000.0, "llm/gone", "teller", told["llm/qwen"], 0.0)
    desk.picker.on_bindings(10_000.0, "llm/other", ())
    desk.picker.on_bindings(10_000.0, "llm/gone", ())

    assert desk.ids_resumed() == [waiting]
    assert [status.peers for status in desk.picker.statuses()] == [1, 0]


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"[" * 100_000, "the body is not JSON: depth limit exceeded"),
        (b'{"model": "m", "tools": ' + b"[" * 2000 + b"]" * 2000 + b"}", "the body is not JSON: depth limit exceeded"),
        # What the parser still takes, but is too deep to be spelt again.
        (b'{"model": "m", "tools": ' + b"[" * 1000 + b"]" * 1000 + b"}", "the body is nested too deeply"),
    ],
    ids=["unclosed", "parser", "spelling"],
)
def test_a_body_that_is_nested_too_deeply_is_a_bad_request(body, why):
    refused = Desk().ask(body)

    assert isinstance(refused, Refused)
    assert refused.status == 400
    assert refused.message.startswith(why)


def test_an_endless_model_name_is_not_sent_back_whole():
    refused = Desk().ask(chat(model="m" * 1_000_000))

    assert isinstance(refused, Refused)
    assert (refused.status, len(refused.message) < 300) == (404, True)
