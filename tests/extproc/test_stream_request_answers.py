"""Tests of requests on a stream in each mode: the answered messages, and the answer with the pick."""

import pytest

from dualmap_extproc.settings import Limits
from dualmap_extproc.wire import ext_proc_pb2 as wire
from extproc.envoy_messages import (
    BUFFERED,
    DUPLEX,
    NO_WAIT,
    STREAMED,
    Conversation,
    chat,
    destination,
    headers_set,
    kinds,
    metadata_of,
    pool,
    refused_with,
    request_bodies,
    request_body,
    request_headers,
    request_trailers,
)
from extproc.stream_requests import every_mode, sent_back


def test_no_wait_mode_sends_the_pick_in_the_late_headers_response():
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


def test_buffered_mode_sends_the_pick_in_the_body_response():
    talk = Conversation()

    first = talk.send(request_headers(BUFFERED))
    second = talk.send(request_body(chat()))

    assert kinds(first) == ["request_headers"]
    assert destination(first[0]) is None
    assert kinds(second) == ["request_body"]
    assert destination(second[0])


def test_buffered_mode_sends_the_pick_with_body_before_trailers():
    talk = Conversation()

    talk.send(request_headers(BUFFERED))
    body = talk.send(request_body(chat(), end=False))
    trailers = talk.send(request_trailers())

    assert destination(body[0])
    assert kinds(trailers) == ["request_trailers"]


@pytest.mark.parametrize("config", [STREAMED, None], ids=["streamed", "unsaid"])
def test_waiting_messages_are_answered_with_the_pick_in_the_last(config):
    talk = Conversation()

    answers = talk.send(request_headers(config), *request_bodies([chat()[:5], chat()[5:9], chat()[9:]]))

    assert kinds(answers) == ["request_headers", "request_body", "request_body", "request_body"]
    assert [destination(answer) is not None for answer in answers] == [False, False, False, True]


def test_duplex_body_is_sent_back_in_chunks_after_the_pick():
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


def test_duplex_default_chunks_are_at_most_62000_bytes():
    talk = Conversation()

    answers = talk.send(request_headers(DUPLEX), request_body(chat("x" * 200_000)))

    assert [len(piece) for piece, _ in sent_back(answers[1:])][:-1] == [62_000] * 3


def test_duplex_trailers_response_ends_the_request():
    talk = Conversation(limits=Limits(chunk_bytes=16))

    silent = talk.send(request_headers(DUPLEX), *request_bodies([chat()[:9], chat()[9:]], end=False))
    answers = talk.send(request_trailers())

    assert silent == []
    assert kinds(answers)[-1] == "request_trailers"
    assert destination(answers[0])
    assert b"".join(piece for piece, _ in sent_back(answers[1:-1])) == chat()
    assert not any(end for _, end in sent_back(answers[1:-1]))


def test_duplex_body_after_the_request_end_is_ignored():
    talk = Conversation()
    talk.send(request_headers(DUPLEX), request_body(chat()))

    assert talk.send(request_body(b"again", end=False), request_body(b"again")) == []
    assert talk.observer.names() == ["routed"]


def test_duplex_trailers_after_the_request_end_are_answered():
    talk = Conversation()
    talk.send(request_headers(DUPLEX), request_body(chat()))

    assert kinds(talk.send(request_trailers())) == ["request_trailers"]


@pytest.mark.parametrize("config", [NO_WAIT, BUFFERED, STREAMED, None])
def test_streamed_body_after_the_request_end_is_answered(config):
    talk = Conversation()
    talk.send(request_headers(config), request_body(chat()))

    assert kinds(talk.send(request_body(b"again"))) == ["request_body"]
    assert talk.observer.names() == ["routed"]


def test_no_wait_mode_trailers_complete_the_request():
    talk = Conversation()

    answers = talk.send(request_headers(NO_WAIT), request_body(chat(), end=False), request_trailers())

    assert kinds(answers) == ["request_headers", "request_body", "request_trailers"]
    assert destination(answers[0])


@every_mode
def test_body_split_at_any_position_gets_the_same_pick(config):
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
def test_body_in_single_byte_chunks_gets_a_single_pick(config):
    talk = Conversation()
    chunks = [chat()] if config is BUFFERED else [bytes([byte]) for byte in chat()]

    answers = talk.send(request_headers(config), *request_bodies(chunks))

    assert sum(destination(answer) is not None for answer in answers) == 1


@every_mode
@pytest.mark.parametrize("method", ["GET", "HEAD", "DELETE", "OPTIONS"])
def test_bodiless_request_is_routed_to_any_member(config, method):
    talk = Conversation()

    answers = talk.send(request_headers(config, method=method, end=True))

    assert kinds(answers) == ["request_headers"]
    assert destination(answers[0]).startswith("10.0.0.")
    assert "dualmap" not in metadata_of(answers[0])
    assert talk.in_flight == 0


@every_mode
def test_get_request_with_empty_body_is_routed_to_any_member(config):
    talk = Conversation()

    answers = talk.send(request_headers(config, method="GET"), request_body(b""))

    assert sum(destination(answer) is not None for answer in answers) == 1
    if config is DUPLEX:
        assert sent_back(answers[1:]) == [(b"", True)]


def test_get_requests_are_spread_round_robin():
    talk = Conversation()
    firsts = set()
    for _ in range(8):
        talk.again()
        firsts.add(destination(talk.send(request_headers(NO_WAIT, method="GET", end=True))[0]).split(",")[0])

    assert len(firsts) == 4


def test_request_with_body_mode_none_is_routed_to_any_member():
    config = wire.ProtocolConfiguration(request_body_mode=wire.NONE, response_body_mode=wire.STREAMED)

    assert destination(Conversation().send(request_headers(config))[0])


def test_trailers_in_streamed_modes_disable_retries():
    """Envoy 1.40 sends such a body twice if the route has a retry policy."""
    for config in (DUPLEX, NO_WAIT):
        answers = Conversation().send(request_headers(config), request_body(chat(), end=False), request_trailers())
        assert headers_set(answers[0])["x-dualmap-no-retry"] == "1"
    buffered = Conversation().send(request_headers(BUFFERED), request_body(chat(), end=False), request_trailers())
    plain = Conversation().send(request_headers(NO_WAIT), request_body(chat()))
    assert "x-dualmap-no-retry" not in headers_set(buffered[1])
    assert "x-dualmap-no-retry" not in headers_set(plain[0])


@pytest.mark.parametrize("config", [STREAMED, None])
def test_waiting_trailers_with_several_pools_are_rejected(config):
    """An answer to trailers cannot set request headers, and without this header Envoy answers 503."""
    several = Conversation(pool("a", model="a"), pool("b", model="m"))
    several.send(request_headers(config), request_body(chat(), end=False))
    one = Conversation()
    one.send(request_headers(config), request_body(chat(), end=False))

    assert refused_with(several.send(request_trailers())) == 400
    assert several.observer.names() == ["refused"]
    assert several.in_flight == 0
    assert "envoy.lb" in metadata_of(one.send(request_trailers())[0])


@pytest.mark.parametrize("config", [NO_WAIT, DUPLEX])
def test_no_wait_trailers_with_several_pools_set_the_cluster(config):
    talk = Conversation(pool("a", model="a"), pool("b", model="m"))
    answers = talk.send(request_headers(config), request_body(chat(), end=False), request_trailers())

    assert headers_set(answers[0])["x-dualmap-cluster"] == "llm/b"
