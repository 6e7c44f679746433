"""Tests of responses on a stream: the receipt, the first token, and the end of the request."""

import pytest

from dualmap_extproc.request.ending import AccessLogEntry, Ending
from dualmap_extproc.request.observations import FirstTokenSeen, Routed
from dualmap_extproc.wire import ext_proc_pb2 as wire
from extproc.envoy_messages import (
    BUFFERED,
    DUPLEX,
    MODES,
    NO_WAIT,
    Conversation,
    chat,
    destination,
    headers_set,
    kinds,
    pool,
    request_body,
    request_headers,
    response_body,
    response_headers,
    response_trailers,
)

every_mode = pytest.mark.parametrize("config", MODES.values(), ids=MODES)
PLAIN_BODY = wire.ProcessingResponse(response_body=wire.BodyResponse())
PLAIN_HEADERS = wire.ProcessingResponse(response_headers=wire.HeadersResponse())


def picked(config=NO_WAIT, *pools) -> Conversation:
    """Return a conversation with a routed request."""
    talk = Conversation(*pools)
    talk.send(request_headers(config), request_body(chat()))
    assert talk.in_flight == 1
    assert talk.pending_tokens > 0
    return talk


@every_mode
def test_receipt_replaces_the_receipt_header_of_the_engine(config):
    talk = picked(config)

    answers = talk.send(response_headers(x_dualmap_decision="the engine's"))

    receipt = talk.observer.of(Routed)[0].decision.receipt
    assert kinds(answers) == ["response_headers"]
    assert headers_set(answers[0]) == {"x-dualmap-decision": receipt.header()}


@pytest.mark.parametrize("status", [200, 404, 500])
def test_receipt_is_sent_with_every_status(status):
    (answer,) = picked().send(response_headers(status))

    assert "x-dualmap-decision" in headers_set(answer)


def test_receipt_is_omitted_if_disabled_or_without_decision():
    off = picked(NO_WAIT, pool(receipt_header=False))
    get = Conversation()
    get.send(request_headers(NO_WAIT, method="GET", end=True))

    assert off.send(response_headers()) == [PLAIN_HEADERS]
    assert get.send(response_headers()) == [PLAIN_HEADERS]


@pytest.mark.parametrize("config", [NO_WAIT, BUFFERED])
def test_first_response_chunk_is_first_token_and_ends_the_stream(config):
    talk = picked(config)
    talk.send(response_headers())
    assert talk.observer.names() == ["routed"]
    assert talk.pending_tokens > 0

    answers = talk.send(response_body())
    talk.close()

    assert answers == [PLAIN_BODY]
    assert talk.stream.ended
    assert talk.observer.names() == ["routed", "first_token"]
    assert (talk.pending_tokens, talk.in_flight) == (0, 1)


def test_time_to_first_token_starts_at_the_request_headers():
    talk = picked()
    talk.send(response_headers(), response_body())

    (seen,) = talk.observer.of(FirstTokenSeen)
    assert seen.first_token.ttft_s == pytest.approx(3.0)


@every_mode
def test_response_of_a_single_chunk_finishes_the_request(config):
    talk = picked(config)

    talk.send(response_headers(), response_body(end=True))

    assert talk.observer.names() == ["routed", "first_token", "finished"]
    assert (talk.pending_tokens, talk.in_flight) == (0, 0)


@every_mode
def test_response_without_body_finishes_without_first_token(config):
    talk = picked(config)

    talk.send(response_headers(204, end=True))

    assert talk.observer.names() == ["routed", "finished"]
    assert talk.in_flight == 0


@every_mode
@pytest.mark.parametrize(
    ("status", "end"),
    [
        *[(status, "rejected") for status in (400, 404, 413, 422)],
        *[(status, "aborted") for status in (101, 408, 429)],
        *[(status, "failed") for status in (500, 502, 503)],
    ],
)
def test_error_response_reports_no_first_token(config, status, end):
    talk = picked(config)

    talk.send(response_headers(status), response_body(), response_body(end=True))
    talk.close()

    assert AccessLogEntry(request_id="r", status=status).ending.value == end
    assert talk.observer.names() == ["routed", end]
    assert (talk.pending_tokens, talk.in_flight) == (0, 0)


@every_mode
@pytest.mark.parametrize("status", [204, 301, 304])
def test_response_without_tokens_finishes_like_its_access_log_entry(config, status):
    talk, with_body = picked(config), picked(config)
    assert AccessLogEntry(request_id="r", status=status).ending is Ending.FINISHED

    talk.send(response_headers(status, end=True))
    with_body.send(response_headers(301), response_body(b"Moved", end=True))

    assert talk.observer.names() == with_body.observer.names() == ["routed", "finished"]


@every_mode
def test_json_response_finishes_at_the_first_chunk(config):
    talk = picked(config)

    talk.send(response_headers(content_type="application/json; charset=utf-8"), response_body(b"{"))

    assert talk.observer.names() == ["routed", "finished"]
    assert talk.in_flight == 0


@every_mode
def test_empty_response_chunk_is_no_first_token(config):
    talk = picked(config)

    talk.send(response_headers(), response_body(b""))

    assert talk.observer.names() == ["routed"]
    assert not talk.stream.ended


def test_duplex_response_is_sent_back_until_the_end():
    talk = picked(DUPLEX)
    chunks = [b"data: 1\n\n", b"y" * 130_000, b"data: [DONE]\n\n", b""]

    answers = talk.send(response_headers(), *[response_body(c, end=i == 3) for i, c in enumerate(chunks)])

    assert kinds(answers)[0] == "response_headers"
    pieces = [each.response_body.response.body_mutation.streamed_response for each in answers[1:]]
    assert b"".join(piece.body for piece in pieces) == b"".join(chunks)
    assert max(len(piece.body) for piece in pieces) <= 62_000
    assert [piece.end_of_stream for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert not talk.stream.ended
    assert talk.observer.names() == ["routed", "first_token", "finished"]


def test_duplex_long_response_does_not_expire():
    talk = picked(DUPLEX)
    talk.send(response_headers(), response_body())
    for _ in range(100):
        talk.now += 59.0
        talk.send(response_body())
        talk.picker.on_deadline(talk.now)

    talk.send(response_body(end=True))

    assert talk.observer.names() == ["routed", "first_token", "finished"]


def test_duplex_response_renews_its_expiry_once_a_minute(monkeypatch):
    talk = picked(DUPLEX)
    heard = []
    monkeypatch.setattr(talk.picker, "heard", lambda now, _: heard.append(now))
    talk.send(response_headers())

    for _ in range(200):
        talk.send(response_body())

    assert len(heard) == 3


def test_duplex_response_trailers_finish_the_request():
    talk = picked(DUPLEX)

    answers = talk.send(response_headers(), response_body(), response_trailers())

    assert kinds(answers) == ["response_headers", "response_body", "response_trailers"]
    assert talk.observer.names() == ["routed", "first_token", "finished"]
    assert not talk.stream.ended


def test_buffered_response_finishes_without_first_token():
    config = wire.ProtocolConfiguration(request_body_mode=wire.BUFFERED, response_body_mode=wire.BUFFERED)
    talk = picked(config)

    assert talk.send(response_headers(), response_body(end=True))[1] == PLAIN_BODY
    assert talk.observer.names() == ["routed", "finished"]


@every_mode
@pytest.mark.parametrize("cancelled", [True, False])
def test_stream_closed_before_response_aborts_the_request(config, cancelled):
    talk = picked(config)

    talk.close(cancelled=cancelled)

    assert talk.observer.names() == ["routed", "aborted"]
    assert (talk.pending_tokens, talk.in_flight) == (0, 0)


@pytest.mark.parametrize("cancelled", [True, False])
def test_duplex_stream_closed_mid_response_aborts_the_request(cancelled):
    talk = picked(DUPLEX)
    talk.send(response_headers(), response_body())

    talk.close(cancelled=cancelled)

    assert talk.observer.names() == ["routed", "first_token", "aborted"]
    assert talk.in_flight == 0


@pytest.mark.parametrize("cancelled", [True, False])
@pytest.mark.parametrize("config", [NO_WAIT, BUFFERED, DUPLEX], ids=["no-wait", "buffered", "duplex"])
def test_stream_closed_before_first_token_aborts_the_request(config, cancelled):
    talk = picked(config)
    talk.send(response_headers())

    talk.close(cancelled=cancelled)

    assert talk.observer.names() == ["routed", "aborted"]


@pytest.mark.parametrize(("cancelled", "end"), [(True, "aborted"), (False, "finished")])
def test_stream_closed_without_body_ends_request_by_the_status(cancelled, end):
    talk = picked(wire.ProtocolConfiguration(request_body_mode=wire.BUFFERED))
    talk.send(response_headers())

    talk.close(cancelled=cancelled)

    assert talk.observer.names() == ["routed", end]


def test_stream_closed_twice_reports_a_single_end():
    talk = picked()
    talk.close(cancelled=True)
    talk.close(cancelled=True)

    assert talk.observer.names() == ["routed", "aborted"]


@every_mode
def test_second_request_of_a_stream_aborts_the_first(config):
    talk = picked(config)

    answers = talk.send(request_headers(config), request_body(chat("another")))

    assert sum(destination(answer) is not None for answer in answers) == 1
    assert talk.observer.names() == ["routed", "aborted", "routed"]
    assert talk.in_flight == 1


def test_served_endpoint_different_from_the_chosen_is_counted():
    talk = picked()
    chosen = talk.observer.of(Routed)[0].decision.receipt.address
    other = next(f"10.0.0.{i}:8000" for i in range(4) if f"10.0.0.{i}:8000" != chosen)

    same = picked()
    same.send(response_headers(served=chosen))
    talk.send(response_headers(served=other))

    assert same.observer.names() == ["routed"]
    assert talk.observer.names() == ["routed", "served_elsewhere"]
    (status,) = talk.picker.statuses()
    assert {each.endpoint: each.in_flight for each in status.endpoints}[other] == 1


def test_stream_answers_no_message_after_the_end():
    talk = picked()
    talk.send(response_headers(), response_body())

    assert talk.send(response_body(), response_body(end=True), response_trailers()) == []


def test_unknown_message_ends_the_stream_and_the_request():
    talk = picked()

    assert talk.send(wire.ProcessingRequest()) == []
    talk.close()

    assert talk.stream.ended
    assert talk.in_flight == 0
