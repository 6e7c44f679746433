"""Requests on a stream whose bodies stall or whose end is never said: how long they are waited for, and what then."""

import pytest

from dualmap.pools.pool import Queue
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
    pool,
    refused_with,
    request_bodies,
    request_body,
    request_headers,
)


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
