"""The client of a request, and what the router does with its name."""

from dataclasses import replace

import pytest

from dualmap.pools.pool import Fairness, Queue
from dualmap.requests import Reason
from dualmap.router import PoolRouter
from dualmap_extproc.errors import Refused
from dualmap_extproc.request.client import NAME_CHARACTERS, client_of
from dualmap_extproc.request.observations import ClientLimited, Rejected
from dualmap_extproc.request.picked import AnswerLater, Picked
from extproc.desks import Desk
from extproc.envoy_messages import chat, pool

FAIRNESS = "x-gateway-inference-fairness-id"
KEY = b"secret"


def client(headers=None, salt="", *, header="x-tenant", key=KEY):
    return client_of(headers or {}, header, salt, key=key)


def test_client_is_the_fairness_header_then_the_pools_then_the_salt():
    everything = {FAIRNESS: "a", "x-tenant": "b"}
    assert client(everything, "c") == client({FAIRNESS: "a"})
    assert client({"x-tenant": "b"}, "c") == client({"x-tenant": "b"})
    assert client({FAIRNESS: "", "x-tenant": ""}, "c") == client(salt="c")
    assert len({client({FAIRNESS: "a"}), client({"x-tenant": "b"}), client(salt="c")}) == 3


def test_client_without_a_name_is_not_told_apart():
    assert client() == client(header="") == 0
    assert client({"x-tenant": "b"}, header="") == 0


def test_client_hash_is_keyed_and_has_64_bits():
    named = {FAIRNESS: "a"}
    assert client(named) == client(named) != client(named, key=b"another")
    assert 0 < client(named) < 2**64


def test_client_salt_is_never_the_client_of_an_equal_header():
    assert client({FAIRNESS: "a"}) != client(salt="a")


def test_client_name_is_read_up_to_the_limit():
    name = "n" * NAME_CHARACTERS
    assert client(salt=name) == client(salt=name + "x") != client(salt=name[:-1])


@pytest.mark.parametrize("name", ["\udcff", "ü", "\x00"])
def test_client_name_of_any_characters_is_hashed(name):
    assert client(salt=name)


def test_picker_keeps_the_headers_that_name_clients():
    of = pool()
    desk = Desk(replace(of, routing=replace(of.routing, fairness=Fairness(header="x-tenant"))))
    assert desk.picker.kept_headers >= {FAIRNESS, "x-tenant"}


def crowded() -> Desk:
    of = pool()
    queue = Queue(dispatch_window_s=0.001, max_held=2)
    return Desk(replace(of, members=of.members[:1], routing=replace(of.routing, queue=queue)))


def test_full_queue_rejects_the_client_with_the_most_requests():
    desk, answers = crowded(), []

    def send(text: str, name: str):
        body = chat(text * 4000)
        return desk.picker.pick(1.0, body, None, 1.0, headers={FAIRNESS: name}, resume=answers.append)

    assert isinstance(send("first", "heavy"), Picked)
    assert isinstance(send("second", "heavy"), AnswerLater)
    assert isinstance(send("third", "heavy"), AnswerLater)
    assert isinstance(send("light", "light"), AnswerLater)

    (refused,) = answers
    assert isinstance(refused, Refused)
    assert (refused.status, refused.code) == (429, Reason.QUEUE_FULL.value)
    assert [each.pool for each in desk.observer.of(ClientLimited)] == ["llm/qwen"]
    assert [each.refused for each in desk.observer.of(Rejected)] == [refused]


def test_full_queue_of_one_client_reports_no_limited_client():
    desk = crowded()
    for text in ("first", "second", "third", "fourth"):
        desk.picker.pick(1.0, chat(text * 4000), None, 1.0, headers={FAIRNESS: "heavy"}, resume=lambda _: None)
    assert len(desk.observer.of(Rejected)) == 1
    assert not desk.observer.of(ClientLimited)


@pytest.mark.parametrize(
    ("headers", "fields", "origin"),
    [
        ({FAIRNESS: "a"}, {}, (False, True)),
        ({FAIRNESS: "a"}, {"cache_salt": "b"}, (False, True)),
        ({}, {"cache_salt": "b"}, (True, True)),
        ({FAIRNESS: "a"}, {"prompt_logprobs": 1}, (False, False)),
    ],
)
def test_picker_tells_whose_counts_are_evidence(monkeypatch, headers, fields, origin):
    requests = []
    place = PoolRouter.on_request

    def on_request(router, now, request):
        requests.append(request)
        return place(router, now, request)

    monkeypatch.setattr(PoolRouter, "on_request", on_request)
    Desk().picker.pick(0.0, chat("m", **fields), None, 0.0, headers=headers, resume=lambda _: None)
    assert [(each.client_is_salt, each.comparable) for each in requests] == [origin]
