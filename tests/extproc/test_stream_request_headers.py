"""Tests of request headers and metadata on a stream: allowed endpoints, removed and set headers, session names."""

import json
from dataclasses import replace

import pytest

from dualmap.pools.pool import Engine, Member, Session
from dualmap_extproc.request.observations import Routed
from dualmap_extproc.settings import Limits
from dualmap_extproc.wire import ext_proc_pb2 as wire
from extproc.envoy_messages import (
    BUFFERED,
    NO_WAIT,
    Conversation,
    chat,
    destination,
    headers_set,
    metadata_of,
    mutation_of,
    pool,
    refused_with,
    request_body,
    request_headers,
    with_subset,
)
from extproc.stream_requests import every_mode


@every_mode
@pytest.mark.parametrize("on_body", [False, True])
@pytest.mark.parametrize(
    ("subset", "expected"),
    [
        (["10.0.0.2:8000"], {"10.0.0.2:8000"}),
        ("10.0.0.2:8000", {"10.0.0.2:8000"}),
        ("10.0.0.1:8000, 10.0.0.2", {"10.0.0.1:8000", "10.0.0.2:8000"}),
        (["10.0.0.3", " 10.0.0.1:8000"], {"10.0.0.3:8000", "10.0.0.1:8000"}),
    ],
)
def test_subset_hint_in_headers_or_body_restricts_the_pick(config, on_body, subset, expected):
    talk = Conversation()
    headers, body = request_headers(config), request_body(chat())
    with_subset(body if on_body else headers, subset)

    answers = talk.send(headers, body)

    (picked,) = [destination(answer) for answer in answers if destination(answer)]
    assert set(picked.split(",")) == expected


@every_mode
@pytest.mark.parametrize(
    ("subset", "expected"),
    [
        (["FD00::1"], {"[fd00::1]:8000", "[fd00::1]:9000"}),
        ("[fd00:0:0::1]", {"[fd00::1]:8000", "[fd00::1]:9000"}),
        ("[FD00::1]:8000", {"[fd00::1]:8000"}),
        ("[fd00::0001]:9000, nonsense::, [, ]:1, [::, fd00::zz, 10.0.0.1", {"[fd00::1]:9000"}),
        (["[fd00::1]:8001"], None),
        (["fd00::zz", "[10.0.0.1]:80"], None),
    ],
)
def test_subset_hint_accepts_any_ipv6_notation(config, subset, expected):
    ports = (8000, 9000)
    members = tuple(Member(id=f"m{port}", address="fd00::1", port=port) for port in ports)
    talk = Conversation(replace(pool(), members=members))

    answers = talk.send(with_subset(request_headers(config), subset), request_body(chat()))

    if expected is None:
        assert refused_with(answers[-1:]) == 503
    else:
        (picked,) = [destination(answer) for answer in answers if destination(answer)]
        assert set(picked.split(",")) == expected


@every_mode
@pytest.mark.parametrize("subset", ["", [], [""], ["10.9.9.9:1"], "10.0.0.2:8001", " , "])
def test_subset_hint_without_any_member_gets_503(config, subset):
    talk = Conversation()
    posted = talk.send(with_subset(request_headers(config), subset), request_body(chat()))
    talk.again()
    got = talk.send(with_subset(request_headers(config, method="GET", end=True), subset))

    assert refused_with(posted[-1:]) == 503
    assert refused_with(got) == 503


@every_mode
def test_reserved_client_headers_are_stripped_and_ignored(config):
    talk = Conversation()
    spoofed = {
        "X-Gateway-Destination-Endpoint": "6.6.6.6:1",
        "x-gateway-destination-endpoint-subset": "10.0.0.1:8000",
        "x-gateway-destination-endpoint-served": "10.0.0.1:8000",
        "x-dualmap-cluster": "evil",
        "x-dualmap-decision": "spoofed",
        "x-harmless": "1",
    }

    answers = talk.send(request_headers(config, **spoofed), request_body(chat()))

    (pick,) = [answer for answer in answers if destination(answer)]
    assert {
        "x-gateway-destination-endpoint-subset",
        "x-gateway-destination-endpoint-served",
        "x-dualmap-decision",
    } <= set(mutation_of(pick).remove_headers)
    assert "x-harmless" not in mutation_of(pick).remove_headers
    # If an answer sets and removes the same header, the result depends on Envoy's order.
    assert not set(headers_set(pick)) & set(mutation_of(pick).remove_headers)
    assert headers_set(pick)["x-dualmap-cluster"] == "llm/qwen"
    unspoofed = Conversation()
    expected = unspoofed.send(request_headers(config), request_body(chat()))
    assert [destination(pick)] == [destination(answer) for answer in expected if destination(answer)]


def test_reserved_headers_are_stripped_in_responses_without_pick():
    answers = Conversation().send(
        request_headers(BUFFERED, x_dualmap_cluster="evil", x_gateway_destination_endpoint="a")
    )

    assert set(mutation_of(answers[0]).remove_headers) == {"x-dualmap-cluster", "x-gateway-destination-endpoint"}


def test_pick_contains_the_request_id_for_the_access_log():
    talk = Conversation()
    answers = talk.send(request_headers(NO_WAIT), request_body(chat()))

    decision = talk.observer.of(Routed)[0].decision
    assert metadata_of(answers[0])["dualmap"] == {"id": decision.request_id}
    assert destination(answers[0]) == decision.destination


def test_pick_destination_lists_two_members_in_order():
    talk = Conversation()
    answers = talk.send(request_headers(NO_WAIT), request_body(chat()))

    first, second = destination(answers[0]).split(",")
    assert first != second
    assert first == talk.observer.of(Routed)[0].decision.receipt.address


def prompt_tokens(path, **fields):
    """Return the picker's token count of a chat body with these fields for ``path``."""
    talk = Conversation()
    headers = request_headers(NO_WAIT)
    header = next(each for each in headers.request_headers.headers.headers if each.key == ":path")
    header.raw_value = path.encode()
    talk.send(headers, request_body(chat(**fields)))
    (status,) = talk.picker.statuses()
    return sum(each.pending_prefill_tokens for each in status.endpoints)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/chat/completions?x=1", "/v1/chat/completion%73"])
@pytest.mark.parametrize(
    "field", ["text_1", "text_2", "prompt", "input", "instructions", "functions", "suffix", "query", "documents"]
)
def test_body_field_that_the_path_ignores_adds_no_load(path, field):
    assert prompt_tokens(path, **{field: "x" * 1_000_000}) < 50


def test_body_fields_on_an_unknown_path_all_add_load():
    assert prompt_tokens("/v1/other", suffix="x" * 1_000_000) == Engine().max_model_len


def test_header_value_in_the_deprecated_field_is_read():
    message = wire.ProcessingRequest(protocol_config=NO_WAIT)
    message.request_headers.end_of_stream = True
    header = message.request_headers.headers.headers.add()
    header.key, header.value = ":method", "POST"

    assert refused_with(Conversation().send(message)) == 400


def test_client_no_retry_header_is_stripped():
    (pick, _) = Conversation().send(request_headers(NO_WAIT, x_dualmap_no_retry="1"), request_body(chat()))

    assert "x-dualmap-no-retry" in mutation_of(pick).remove_headers


@every_mode
@pytest.mark.parametrize("where", ["headers", "body"])
def test_subset_hint_above_the_limit_is_rejected(config, where):
    talk = Conversation(limits=Limits(subset_bytes=1000))
    subset = [f"10.0.{n}.1:8000" for n in range(100)]
    headers, body = request_headers(config), request_body(chat())
    with_subset(headers if where == "headers" else body, subset)

    answers = talk.send(headers, body)

    assert refused_with(answers[-1:]) == 400
    assert json.loads(answers[-1].immediate_response.body)["error"]["code"] == "subset_too_large"
    assert talk.observer.names() == ["refused"]


def test_subset_hint_with_thousands_of_endpoints_is_read():
    talk = Conversation()
    subset = [f"10.{1 + n // 200}.{n % 200}.1:8000" for n in range(8000)]

    answers = talk.send(with_subset(request_headers(NO_WAIT), ",".join([*subset, "10.0.0.3"])), request_body(chat()))

    assert destination(answers[0]) == "10.0.0.3:8000"


@every_mode
def test_picker_receives_only_session_headers(config, monkeypatch):
    talk = Conversation(
        pool("a", model="m", session=Session(header="X-Session")), pool("b", model="b", session=Session(header="x-b"))
    )
    asked = []
    real = talk.picker.pick
    monkeypatch.setattr(
        talk.picker,
        "pick",
        lambda *args, headers, **rest: asked.append(headers) or real(*args, headers=headers, **rest),
    )

    headers = {"x_session": "s1", "X_B": "s2", "authorization": "secret", "x_session_id": "none of theirs"}
    talk.send(request_headers(config, **headers), request_body(chat()))

    assert asked == [{"x-session": "s1", "x-b": "s2"}]


def test_repeated_session_header_of_any_bytes_counts_once(monkeypatch):
    talk = Conversation()
    asked = []
    real = talk.picker.pick
    monkeypatch.setattr(
        talk.picker,
        "pick",
        lambda *args, headers, **rest: asked.append(headers) or real(*args, headers=headers, **rest),
    )
    message = request_headers(NO_WAIT)
    for value in (b"\xff\xfe", b"second"):
        message.request_headers.headers.headers.add(key="x-session-id", raw_value=value)

    talk.send(message, request_body(chat()))

    assert asked == [{"x-session-id": "\udcff\udcfe"}]
    assert talk.observer.names() == ["routed"]
