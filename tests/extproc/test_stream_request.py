"""The request's half of the stream machine: when it answers, with what, and which answer carries the pick."""

import json
from dataclasses import replace

import pytest

from dualmap.pool import Member, Queue, Session
from dualmap_extproc.settings import Limits
from dualmap_extproc.wire import ext_proc_pb2 as wire
from extproc.envoy_messages import (
    BUFFERED,
    DUPLEX,
    MODES,
    NO_WAIT,
    STREAMED,
    Conversation,
    chat,
    destination,
    headers_set,
    kinds,
    metadata_of,
    mutation_of,
    pool,
    refused_with,
    request_bodies,
    request_body,
    request_headers,
    request_trailers,
    with_subset,
)

every_mode = pytest.mark.parametrize("config", MODES.values(), ids=MODES)


def sent_back(answers: list[wire.ProcessingResponse]) -> list[tuple[bytes, bool]]:
    pieces = [answer.request_body.response.body_mutation.streamed_response for answer in answers]
    return [(piece.body, piece.end_of_stream) for piece in pieces]


def test_no_wait_answers_nothing_before_the_body_ends_then_the_pick_rides_on_the_headers():
    talk = Conversation()
    chunks = [chat()[:10], chat()[10:], b""]

    silent = talk.send(request_headers(NO_WAIT), *request_bodies(chunks)[:2])
    answers = talk.send(request_bodies(chunks)[2])

    assert silent == []
    assert kinds(answers) == ["request_headers", "request_body", "request_body", "request_body"]
    assert destination(answers[0])
    for plain in answers[1:]:
        assert plain == wire.ProcessingResponse(request_body=wire.BodyResponse())
    assert not talk.stream.ended


def test_buffered_answers_the_headers_at_once_and_the_pick_rides_on_the_body():
    talk = Conversation()

    first = talk.send(request_headers(BUFFERED))
    second = talk.send(request_body(chat()))

    assert kinds(first) == ["request_headers"]
    assert destination(first[0]) is None
    assert kinds(second) == ["request_body"]
    assert destination(second[0])


def test_buffered_with_trailers_has_its_whole_body_in_one_message_that_does_not_end_the_stream():
    talk = Conversation()

    talk.send(request_headers(BUFFERED))
    body = talk.send(request_body(chat(), end=False))
    trailers = talk.send(request_trailers())

    assert destination(body[0])
    assert kinds(trailers) == ["request_trailers"]


@pytest.mark.parametrize("config", [STREAMED, None], ids=["streamed", "unsaid"])
def test_waiting_senders_get_an_answer_to_each_message_and_the_pick_on_the_last(config):
    talk = Conversation()

    answers = talk.send(request_headers(config), *request_bodies([chat()[:5], chat()[5:9], chat()[9:]]))

    assert kinds(answers) == ["request_headers", "request_body", "request_body", "request_body"]
    assert [destination(answer) is not None for answer in answers] == [False, False, False, True]


def test_duplex_answers_nothing_before_the_decision_then_sends_the_body_back_in_small_pieces():
    talk = Conversation(limits=Limits(chunk_bytes=10))
    body = chat("x" * 50)

    silent = talk.send(request_headers(DUPLEX), request_body(body[:30], end=False))
    answers = talk.send(request_body(body[30:]))

    assert silent == []
    assert kinds(answers)[0] == "request_headers"
    assert destination(answers[0])
    pieces = sent_back(answers[1:])
    assert b"".join(piece for piece, _ in pieces) == body
    assert max(len(piece) for piece, _ in pieces) == 10
    assert [end for _, end in pieces] == [False] * (len(pieces) - 1) + [True]


def test_duplex_pieces_are_at_most_62000_bytes_by_default():
    talk = Conversation()

    answers = talk.send(request_headers(DUPLEX), request_body(chat("x" * 200_000)))

    assert [len(piece) for piece, _ in sent_back(answers[1:])][:-1] == [62_000] * 3


def test_duplex_with_trailers_ends_the_stream_by_the_trailers_alone():
    talk = Conversation(limits=Limits(chunk_bytes=16))

    silent = talk.send(request_headers(DUPLEX), *request_bodies([chat()[:9], chat()[9:]], end=False))
    answers = talk.send(request_trailers())

    assert silent == []
    assert kinds(answers)[-1] == "request_trailers"
    assert destination(answers[0])
    assert b"".join(piece for piece, _ in sent_back(answers[1:-1])) == chat()
    assert not any(end for _, end in sent_back(answers[1:-1]))


def test_duplex_ignores_body_messages_after_the_end():
    talk = Conversation()
    talk.send(request_headers(DUPLEX), request_body(chat()))

    assert talk.send(request_body(b"again", end=False), request_body(b"again")) == []
    assert talk.observer.names() == ["routed"]


def test_duplex_answers_trailers_that_come_after_the_end():
    talk = Conversation()
    talk.send(request_headers(DUPLEX), request_body(chat()))

    assert kinds(talk.send(request_trailers())) == ["request_trailers"]


@pytest.mark.parametrize("config", [NO_WAIT, BUFFERED, STREAMED, None])
def test_late_body_messages_are_answered_where_envoy_counts_answers(config):
    talk = Conversation()
    talk.send(request_headers(config), request_body(chat()))

    assert kinds(talk.send(request_body(b"again"))) == ["request_body"]
    assert talk.observer.names() == ["routed"]


def test_no_wait_with_trailers_answers_headers_bodies_and_trailers():
    talk = Conversation()

    answers = talk.send(request_headers(NO_WAIT), request_body(chat(), end=False), request_trailers())

    assert kinds(answers) == ["request_headers", "request_body", "request_trailers"]
    assert destination(answers[0])


@every_mode
def test_a_body_split_at_every_byte_picks_as_the_whole_one_does(config):
    body = chat("ünïcode \\u00e9")
    whole = Conversation()
    expected = whole.send(request_headers(config), request_body(body))
    for cut in range(1, len(body)):
        talk = Conversation()
        split = [body] if config is BUFFERED else [body[:cut], body[cut:]]

        answers = talk.send(request_headers(config), *request_bodies(split))

        assert [destination(each) for each in answers if destination(each)] == [
            destination(each) for each in expected if destination(each)
        ]
        if config is DUPLEX:
            assert b"".join(piece for piece, _ in sent_back(answers[1:])) == body


@every_mode
def test_a_body_byte_by_byte(config):
    talk = Conversation()
    chunks = [chat()] if config is BUFFERED else [bytes([byte]) for byte in chat()]

    answers = talk.send(request_headers(config), *request_bodies(chunks))

    assert sum(destination(answer) is not None for answer in answers) == 1


@every_mode
@pytest.mark.parametrize("method", ["GET", "HEAD", "DELETE", "OPTIONS"])
def test_bodiless_requests_go_to_any_member_at_once(config, method):
    talk = Conversation()

    answers = talk.send(request_headers(config, method=method, end=True))

    assert kinds(answers) == ["request_headers"]
    assert destination(answers[0]).startswith("10.0.0.")
    assert "dualmap" not in metadata_of(answers[0])
    assert talk.in_flight == 0


@every_mode
def test_a_get_whose_end_comes_as_an_empty_body_goes_to_any_member(config):
    talk = Conversation()

    answers = talk.send(request_headers(config, method="GET"), request_body(b""))

    assert sum(destination(answer) is not None for answer in answers) == 1
    if config is DUPLEX:
        assert sent_back(answers[1:]) == [(b"", True)]


def test_gets_take_turns_over_the_members():
    talk = Conversation()
    firsts = set()
    for _ in range(8):
        talk.again()
        firsts.add(destination(talk.send(request_headers(NO_WAIT, method="GET", end=True))[0]).split(",")[0])

    assert len(firsts) == 4


@every_mode
@pytest.mark.parametrize(
    "headers",
    [{"content_length": "12"}, {"content_length": "nonsense"}, {"content_length": "9" * 5000}, {"content_length": "²"}],
)
def test_odd_content_lengths_do_not_matter(config, headers):
    talk = Conversation()

    answers = talk.send(request_headers(config, **headers), request_body(chat()))

    assert sum(destination(answer) is not None for answer in answers) == 1


@every_mode
def test_a_content_length_above_the_limit_is_refused_before_the_body(config):
    talk = Conversation(limits=Limits(body_bytes=1000))

    assert refused_with(talk.send(request_headers(config, content_length="1001"))) == 413
    assert talk.stream.ended


@every_mode
def test_a_body_above_the_limit_is_refused_when_it_gets_there(config):
    talk = Conversation(limits=Limits(body_bytes=1000))
    chunks = [b"x" * 1001] if config is BUFFERED else [b"x" * 600, b"x" * 401]

    answers = talk.send(request_headers(config), *request_bodies(chunks, end=False))

    assert refused_with(answers[-1:]) == 413
    assert talk.stream.ended
    assert talk.send(request_body(b"more")) == []


@every_mode
def test_a_body_of_exactly_the_limit_passes(config):
    body = chat()
    talk = Conversation(limits=Limits(body_bytes=len(body)))

    answers = talk.send(request_headers(config, content_length=str(len(body))), request_body(body))

    assert destination(answers[0] if config in (NO_WAIT, DUPLEX) else answers[-1])


@every_mode
def test_twelve_megabytes_pass_whole_and_in_pieces(config):
    body = chat("long prompt " * 1_000_000)
    assert len(body) > 12_000_000
    step = len(body) if config is BUFFERED else 65_536
    talk = Conversation()

    answers = talk.send(request_headers(config), *request_bodies(body[i : i + step] for i in range(0, len(body), step)))

    assert sum(destination(answer) is not None for answer in answers) == 1
    if config is DUPLEX:
        assert b"".join(piece for piece, _ in sent_back(answers[1:])) == body


@every_mode
@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"[]", 400),
        (b"null", 400),
        (b'"text"', 400),
        (b"{}", 400),
        (b'{"model": 7}', 400),
        (b'{"model": ["m"]}', 400),
        (b'{"model": "m", "n": NaN}', 400),
        (b'{"model": "\\ud800"}', 400),
        (b"\xef\xbb\xbf" + chat(), 400),
        (b"\x1f\x8b\x08\x00gzip", 400),
        (b"[" * 100_000, 400),
        (b'{"a":' * 100_000, 400),
        (b'{"model": "m", "messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400),
        (chat(model="unknown"), 404),
    ],
)
def test_bad_bodies_are_refused_in_openai_form(config, body, status):
    talk = Conversation()

    answers = talk.send(request_headers(config), request_body(body))

    assert refused_with(answers[-1:]) == status
    assert talk.stream.ended
    assert talk.in_flight == 0


@every_mode
@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "m"}',
        b'{"model": "m", "model": "m", "messages": []}',
        b'{"model": "m", "prompt": 123456789012345678901234567890}',
        b'{"model": "m", "messages": {"role": "user"}}',
        b'{"model": "m", "messages": [null, 1, "x", [[]], {"content": {"a": [{}]}}]}',
        b'{"model": "m", "messages": [{"role": 1, "content": [1, null, {"type": "text"}]}]}',
        b'{"model": "m", "prompt": ' + b"[" * 50 + b"]" * 50 + b"}",
        b'{"model": "m", "tools": "none", "cache_salt": 7, "lora_path": {"a": 1}}',
        b'  {"model": "m", "input": ""}  ',
    ],
)
def test_odd_but_valid_bodies_are_picked_for(config, body):
    talk = Conversation()

    answers = talk.send(request_headers(config), request_body(body))

    assert sum(destination(answer) is not None for answer in answers) == 1


@every_mode
def test_a_post_that_ends_with_its_headers_has_no_body(config):
    assert refused_with(Conversation().send(request_headers(config, end=True))) == 400


@every_mode
def test_an_empty_pool_answers_503_and_leaves_nothing_behind(config):
    talk = Conversation(pool(members=0))

    assert refused_with(talk.send(request_headers(config), request_body(chat()))[-1:]) == 503
    talk.again()
    assert refused_with(talk.send(request_headers(config, method="GET", end=True))) == 503
    assert talk.in_flight == 0


@every_mode
def test_no_pools_at_all(config):
    talk = Conversation()
    talk.picker.set_pools(1.0, ())

    assert refused_with(talk.send(request_headers(config), request_body(chat()))[-1:]) == 404
    talk.again()
    assert refused_with(talk.send(request_headers(config, method="GET", end=True))) == 503


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
def test_the_subset_hint_restricts_the_pick_whichever_message_carries_it(config, on_body, subset, expected):
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
def test_ipv6_endpoints_of_the_subset_may_be_spelt_in_any_way(config, subset, expected):
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
def test_a_subset_that_allows_nothing_is_503_for_posts_and_gets(config, subset):
    talk = Conversation()
    posted = talk.send(with_subset(request_headers(config), subset), request_body(chat()))
    talk.again()
    got = talk.send(with_subset(request_headers(config, method="GET", end=True), subset))

    assert refused_with(posted[-1:]) == 503
    assert refused_with(got) == 503


@every_mode
def test_client_headers_of_ours_are_stripped_and_never_read(config):
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
    # Set and removed in one answer would leave it to Envoy's order which of the two wins.
    assert not set(headers_set(pick)) & set(mutation_of(pick).remove_headers)
    assert headers_set(pick)["x-dualmap-cluster"] == "llm/qwen"
    unspoofed = Conversation()
    expected = unspoofed.send(request_headers(config), request_body(chat()))
    assert [destination(pick)] == [destination(answer) for answer in expected if destination(answer)]


def test_plain_header_answers_strip_too():
    answers = Conversation().send(
        request_headers(BUFFERED, x_dualmap_cluster="evil", x_gateway_destination_endpoint="a")
    )

    assert set(mutation_of(answers[0]).remove_headers) == {"x-dualmap-cluster", "x-gateway-destination-endpoint"}


def test_the_pick_carries_our_id_for_the_access_log():
    talk = Conversation()
    answers = talk.send(request_headers(NO_WAIT), request_body(chat()))

    decision = talk.observer.events[0][2]
    assert metadata_of(answers[0])["dualmap"] == {"id": decision.request_id}
    assert destination(answers[0]) == decision.destination


def test_the_destination_is_two_members_in_order_of_choice():
    talk = Conversation()
    answers = talk.send(request_headers(NO_WAIT), request_body(chat()))

    first, second = destination(answers[0]).split(",")
    assert first != second
    assert first == talk.observer.events[0][2].receipt.address


def test_header_values_in_the_old_field_are_read():
    message = wire.ProcessingRequest(protocol_config=NO_WAIT)
    message.request_headers.end_of_stream = True
    header = message.request_headers.headers.headers.add()
    header.key, header.value = ":method", "POST"

    assert refused_with(Conversation().send(message)) == 400


def test_a_gateway_that_never_sends_bodies_gets_any_member():
    config = wire.ProtocolConfiguration(request_body_mode=wire.NONE, response_body_mode=wire.STREAMED)

    assert destination(Conversation().send(request_headers(config))[0])


def test_retries_are_off_for_a_request_with_trailers_in_the_streamed_modes():
    """Envoy 1.40 sends such a body twice where the route has a retry policy."""
    for config in (DUPLEX, NO_WAIT):
        answers = Conversation().send(request_headers(config), request_body(chat(), end=False), request_trailers())
        assert headers_set(answers[0])["x-dualmap-no-retry"] == "1"
    buffered = Conversation().send(request_headers(BUFFERED), request_body(chat(), end=False), request_trailers())
    plain = Conversation().send(request_headers(NO_WAIT), request_body(chat()))
    assert "x-dualmap-no-retry" not in headers_set(buffered[1])
    assert "x-dualmap-no-retry" not in headers_set(plain[0])


def test_a_clients_wish_not_to_be_retried_is_stripped():
    (pick, _) = Conversation().send(request_headers(NO_WAIT, x_dualmap_no_retry="1"), request_body(chat()))

    assert "x-dualmap-no-retry" in mutation_of(pick).remove_headers


@pytest.mark.parametrize("headers", [{"content_length": str(len(chat()))}, {}])
def test_no_wait_decides_on_a_whole_body_after_silence_without_retries(headers):
    talk = Conversation()
    assert talk.send(request_headers(NO_WAIT, **headers), *request_bodies([chat()[:9], chat()[9:]], end=False)) == []
    assert talk.stream.deadline_s == pytest.approx(talk.now + talk.limits.silence_s)

    answers = talk.stream.on_deadline(talk.stream.deadline_s)

    assert kinds(answers) == ["request_headers", "request_body", "request_body"]
    assert destination(answers[0])
    assert headers_set(answers[0])["x-dualmap-no-retry"] == "1"
    assert talk.stream.deadline_s is None
    assert kinds(talk.send(request_body(b""))) == ["request_body"]
    assert talk.observer.names() == ["routed"]


def test_what_arrives_before_the_silence_is_over_goes_first():
    talk = Conversation()
    talk.send(request_headers(NO_WAIT), request_body(chat(), end=False))

    answers = talk.send(request_body(b""))

    assert talk.stream.deadline_s is None
    assert "x-dualmap-no-retry" not in headers_set(answers[0])


def silent(talk: Conversation, *, until_s: float) -> list[wire.ProcessingResponse]:
    """Let nothing arrive for ``until_s``; return what is answered by then."""
    until_s += talk.now
    answers = []
    while talk.stream.deadline_s is not None and talk.stream.deadline_s <= until_s:
        talk.now = talk.stream.deadline_s
        answers += talk.stream.on_deadline(talk.now)
    talk.now = until_s
    return answers


@pytest.mark.parametrize(
    ("length", "half"),
    [
        ("", b'{"model": "m", "tools": {}'),
        ("", chat()[:-1]),
        ("", chat("\N{SNOWMAN}").replace(b"\\u2603", "\N{SNOWMAN}".encode()[:2])[:-4]),
        ("", b" \n"),
        ("", b""),
        ("1000", chat()),
        ("1000", b"nonsense"),
    ],
)
def test_a_slow_client_is_waited_for_almost_as_long_as_envoy_waits_for_us(length, half):
    """Envoy's own patience is the pools' longest wait and 15 s (``envoy.filters``), anew with each message."""
    talk = Conversation()
    talk.send(request_headers(NO_WAIT, content_length=length))
    for _ in range(3):
        assert silent(talk, until_s=30.0 + 9.0) == []
        talk.send(request_body(b"", end=False))
    talk.send(request_body(half, end=False))
    assert silent(talk, until_s=30.0 + 9.0) == []

    answers = silent(talk, until_s=2.0)

    if half == chat():
        assert destination(answers[0])
    else:
        assert refused_with(answers) == 400
        assert talk.stream.ended
        assert talk.observer.names() == ["refused"]
    assert talk.stream.deadline_s is None


def test_a_stalled_body_that_goes_on_is_picked_for():
    talk = Conversation()
    talk.send(request_headers(NO_WAIT), request_body(b'{"model": "m", "tools": {}', end=False))
    assert silent(talk, until_s=35.0) == []

    assert destination(talk.send(request_body(b"}"))[0])


def test_the_patience_with_a_stalled_body_follows_the_pools_longest_wait():
    quick, slow = pool(queue=Queue(max_wait_s=0.1)), pool("b", model="b", queue=Queue(max_wait_s=600.0))
    impatient, patient = Conversation(quick), Conversation(quick, slow)
    for talk in (impatient, patient):
        talk.send(request_headers(NO_WAIT), request_body(b'{"model": ', end=False))

    assert refused_with(silent(impatient, until_s=11.0)) == 400
    assert silent(patient, until_s=609.0) == []
    assert refused_with(silent(patient, until_s=2.0)) == 400


@pytest.mark.parametrize(
    "body",
    [b"not json", b"[1,2]", b"nope}", b'{"model": nope}', b'"text"', b"5", b"\x1f\x8b\x08", b'{"model": "m"}}', b"{}"],
)
def test_no_wait_refuses_what_cannot_become_a_request_after_a_pause(body):
    """An HTTP/2 request with trailers: neither its end nor its trailers are said before the headers are answered."""
    talk = Conversation()
    talk.send(request_headers(NO_WAIT), request_body(body, end=False))

    assert refused_with(silent(talk, until_s=3.0)) == 400
    assert talk.stream.ended
    assert talk.in_flight == 0


def test_a_whole_body_that_does_not_look_like_one_is_picked_for_after_a_pause():
    talk = Conversation()
    talk.send(request_headers(NO_WAIT), request_body(chat(), end=False), request_body(b"\n", end=False))

    assert destination(silent(talk, until_s=3.0)[0])


def test_a_get_with_trailers_does_not_wait_for_a_body():
    talk = Conversation()
    talk.send(request_headers(NO_WAIT, method="GET"))

    answers = silent(talk, until_s=1.0)

    assert destination(answers[0])
    assert headers_set(answers[0])["x-dualmap-no-retry"] == "1"


@pytest.mark.parametrize("config", [DUPLEX, STREAMED, BUFFERED, None])
def test_no_deadline_where_the_end_of_the_body_will_be_said(config):
    talk = Conversation()
    talk.send(request_headers(config), request_body(chat()[:-1], end=False))

    assert talk.stream.deadline_s is None


@pytest.mark.parametrize("config", [STREAMED, None])
def test_trailers_that_cannot_name_a_cluster_are_refused_where_there_are_several(config):
    """Trailers' answers set no request headers, and without one Envoy takes the first pool's cluster."""
    several = Conversation(pool("a", model="a"), pool("b", model="m"))
    several.send(request_headers(config), request_body(chat(), end=False))
    one = Conversation()
    one.send(request_headers(config), request_body(chat(), end=False))

    assert refused_with(several.send(request_trailers())) == 400
    assert several.observer.names() == ["refused"]
    assert several.in_flight == 0
    assert "envoy.lb" in metadata_of(one.send(request_trailers())[0])


@pytest.mark.parametrize("config", [NO_WAIT, DUPLEX])
def test_trailers_are_no_matter_where_the_headers_wait_for_the_pick(config):
    talk = Conversation(pool("a", model="a"), pool("b", model="m"))
    answers = talk.send(request_headers(config), request_body(chat(), end=False), request_trailers())

    assert headers_set(answers[0])["x-dualmap-cluster"] == "llm/b"


@every_mode
@pytest.mark.parametrize(
    ("headers", "said"),
    [
        ({"content_encoding": "gzip"}, "content-encoding gzip is not supported: send the body plain"),
        ({"Content_Encoding": "identity, BR"}, "content-encoding identity, br is not supported"),
        ({"content_encoding": "x" * 5000}, "..."),
        ({"content_type": "Multipart/Form-Data; boundary=x"}, "content-type multipart/form-data is not supported"),
    ],
)
def test_a_body_that_cannot_be_read_is_refused_at_its_headers_in_plain_words(config, headers, said):
    talk = Conversation()

    answers = talk.send(request_headers(config, **headers))

    assert refused_with(answers) == 400
    message = json.loads(answers[0].immediate_response.body)["error"]["message"]
    assert said in message
    assert len(message) < 200
    assert talk.stream.ended
    assert talk.observer.names() == ["refused"]


@every_mode
@pytest.mark.parametrize(
    "headers", [{"content_encoding": "Identity"}, {"content_encoding": ""}, {"content_type": "application/json"}]
)
def test_a_plain_body_is_read(config, headers):
    talk = Conversation()

    talk.send(request_headers(config, **headers), request_body(chat()))

    assert talk.observer.names() == ["routed"]


def test_headers_about_a_body_that_does_not_come_matter_to_nobody():
    talk = Conversation()

    talk.send(request_headers(NO_WAIT, method="GET", end=True, content_encoding="gzip"))

    assert talk.observer.names() == ["routed_bodiless"]


@every_mode
@pytest.mark.parametrize("method", ["POST", "GET"])
@pytest.mark.parametrize(
    ("limits", "headers", "said"),
    [
        (Limits(headers=5), {f"x_{n}": "" for n in range(4)}, "The request has more than 5 headers"),
        (Limits(header_bytes=1000), {"x_long": "x" * 1000}, "The request's headers are larger than 1000 bytes"),
        (Limits(header_bytes=1000), {"x_" + "long" * 250: ""}, "The request's headers are larger than 1000 bytes"),
    ],
    ids=["many", "long value", "long name"],
)
def test_more_headers_than_are_read_are_refused_in_plain_words(config, method, limits, headers, said):
    talk = Conversation(limits=limits)

    answers = talk.send(request_headers(config, method=method, end=method == "GET", **headers))

    assert refused_with(answers) == 400
    error = json.loads(answers[0].immediate_response.body)["error"]
    assert (error["code"], error["message"]) == ("headers_too_large", said)
    assert talk.stream.ended
    assert talk.observer.names() == ["refused"]


@every_mode
def test_as_many_headers_as_envoy_ever_sends_are_read(config):
    """Envoy takes 100 headers of 60 KiB together by default."""
    talk = Conversation()
    headers = {f"x_{n}": "v" * 600 for n in range(96)}

    talk.send(request_headers(config, **headers), request_body(chat()))

    assert talk.observer.names() == ["routed"]


@every_mode
@pytest.mark.parametrize("where", ["headers", "body"])
def test_more_allowed_endpoints_than_are_read_are_refused_in_plain_words(config, where):
    talk = Conversation(limits=Limits(subset_bytes=1000))
    subset = [f"10.0.{n}.1:8000" for n in range(100)]
    headers, body = request_headers(config), request_body(chat())
    with_subset(headers if where == "headers" else body, subset)

    answers = talk.send(headers, body)

    assert refused_with(answers[-1:]) == 400
    assert json.loads(answers[-1].immediate_response.body)["error"]["code"] == "subset_too_large"
    assert talk.observer.names() == ["refused"]


def test_thousands_of_allowed_endpoints_are_read():
    talk = Conversation()
    subset = [f"10.{1 + n // 200}.{n % 200}.1:8000" for n in range(8000)]

    answers = talk.send(with_subset(request_headers(NO_WAIT), ",".join([*subset, "10.0.0.3"])), request_body(chat()))

    assert destination(answers[0]) == "10.0.0.3:8000"


@every_mode
def test_of_a_requests_headers_the_picker_gets_those_that_name_sessions(config, monkeypatch):
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


def test_of_a_header_that_comes_twice_the_first_counts_and_any_bytes_are_a_name(monkeypatch):
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
