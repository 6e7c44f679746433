"""Tests of requests with a stalled body or without a reported end: the time and result of the decision."""

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
    crowded_pool,
    decoded,
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
def test_silence_after_complete_body_disables_retries_of_the_pick(headers):
    talk = Conversation()
    assert talk.send(request_headers(NO_WAIT, **headers), *request_bodies([chat()[:9], chat()[9:]], end=False)) == []
    assert talk.stream.deadline_s == pytest.approx(talk.now + talk.limits.silence_s)

    answers = decoded(talk.stream.on_deadline(talk.stream.deadline_s))

    assert kinds(answers) == ["request_headers", "request_body", "request_body"]
    assert destination(answers[0])
    assert headers_set(answers[0])["x-dualmap-no-retry"] == "1"
    assert talk.stream.deadline_s is None
    assert kinds(talk.send(request_body(b""))) == ["request_body"]
    assert talk.observer.names() == ["routed"]


def test_silence_ended_by_a_message_keeps_retries():
    talk = Conversation()
    talk.send(request_headers(NO_WAIT), request_body(chat(), end=False))

    answers = talk.send(request_body(b""))

    assert talk.stream.deadline_s is None
    assert "x-dualmap-no-retry" not in headers_set(answers[0])


def silent(talk: Conversation, *, until_s: float) -> list[wire.ProcessingResponse]:
    """Advance to ``until_s`` without messages; return the answers until then."""
    until_s += talk.now
    answers = []
    while talk.stream.deadline_s is not None and talk.stream.deadline_s <= until_s:
        talk.now = talk.stream.deadline_s
        answers += decoded(talk.stream.on_deadline(talk.now))
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
def test_stalled_body_is_answered_before_the_envoy_timeout(length, half):
    """Envoy's message timeout is at least 45 s, and restarts with each message."""
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


def test_stalled_body_that_continues_is_routed():
    talk = Conversation()
    talk.send(request_headers(NO_WAIT), request_body(b'{"model": "m", "tools": {}', end=False))
    assert silent(talk, until_s=35.0) == []

    assert destination(talk.send(request_body(b"}"))[0])


def test_stalled_body_timeout_does_not_depend_on_max_wait():
    quick, slow = pool(queue=Queue(max_wait_s=0.1)), pool("b", model="b", queue=Queue(max_wait_s=600.0))
    for talk in (Conversation(quick), Conversation(quick, slow)):
        talk.send(request_headers(NO_WAIT), request_body(b'{"model": ', end=False))

        assert silent(talk, until_s=39.0) == []
        assert refused_with(silent(talk, until_s=2.0)) == 400


@pytest.mark.parametrize(
    "body",
    [b"not json", b"[1,2]", b"nope}", b'{"model": nope}', b'"text"', b"5", b"\x1f\x8b\x08", b'{"model": "m"}}', b"{}"],
)
def test_paused_body_with_invalid_start_is_rejected(body):
    """For an HTTP/2 request with trailers, Envoy reports the end only after the answer to the headers."""
    talk = Conversation()
    talk.send(request_headers(NO_WAIT), request_body(body, end=False))

    assert refused_with(silent(talk, until_s=3.0)) == 400
    assert talk.stream.ended
    assert talk.in_flight == 0


def test_paused_complete_body_is_routed():
    talk = Conversation()
    talk.send(request_headers(NO_WAIT), request_body(chat(), end=False), request_body(b"\n", end=False))

    assert destination(silent(talk, until_s=3.0)[0])


def test_silence_after_get_headers_picks_any_member():
    talk = Conversation()
    talk.send(request_headers(NO_WAIT, method="GET"))

    answers = silent(talk, until_s=1.0)

    assert destination(answers[0])
    assert headers_set(answers[0])["x-dualmap-no-retry"] == "1"


@pytest.mark.parametrize("config", [DUPLEX, STREAMED, BUFFERED, None])
def test_silence_sets_no_deadline_in_other_modes(config):
    talk = Conversation()
    talk.send(request_headers(config), request_body(chat()[:-1], end=False))

    assert talk.stream.deadline_s is None


def small(limit_bytes: int) -> Conversation:
    """Send a complete body without its end to a pool with this limit, and decide after the silence."""
    talk = Conversation(pool(max_body_bytes=limit_bytes), pool("large", model="large"))
    talk.send(request_headers(NO_WAIT), request_body(chat(), end=False))
    assert destination(silent(talk, until_s=1.0)[0])
    return talk


def test_body_that_grows_above_its_pools_limit_after_the_pick_gets_413():
    talk = small(1000)
    left = 1000 - len(chat())

    assert kinds(talk.send(request_body(b" " * left, end=False))) == ["request_body"]
    assert refused_with(talk.send(request_body(b" ", end=False))) == 413
    assert talk.stream.ended
    assert talk.in_flight == 0


def test_body_that_grows_above_the_limit_while_queued_gets_413():
    talk = Conversation(crowded_pool())
    talk.send(request_headers(NO_WAIT), request_body(chat("long " * 10_000)))
    talk.again()
    talk.send(request_headers(NO_WAIT), request_body(chat(), end=False))
    assert silent(talk, until_s=1.0) == []
    assert talk.held == 1

    assert refused_with(talk.send(request_body(b" " * talk.picker.max_body_bytes, end=False))) == 413
    assert talk.held == 0
    assert talk.in_flight == 1
