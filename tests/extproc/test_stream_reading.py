"""A stream whose large body is read elsewhere: answers afterwards, and what may happen to the request meanwhile."""

from collections.abc import Callable

import pytest

from dualmap.prompts.prompt import Prompt
from dualmap_extproc.errors import Refused, invalid_body
from dualmap_extproc.request.body import read_body
from dualmap_extproc.request.client import NAME_CHARACTERS
from dualmap_extproc.request.observations import Decided, Rejected
from dualmap_extproc.request.reading import Done, LargeBody
from dualmap_extproc.request.stream import Phase
from dualmap_extproc.wire import ext_proc_pb2 as wire
from extproc.envoy_messages import (
    BUFFERED,
    DUPLEX,
    MODES,
    NO_WAIT,
    Conversation,
    chat,
    crowded_pool,
    destination,
    kinds,
    pool,
    refused_with,
    request_bodies,
    request_body,
    request_headers,
    request_trailers,
    response_headers,
)
from extproc.stream_requests import every_mode, sent_back

BODY = chat("long text " * 60_000)


class HeldReader:
    """A reader whose readings end when the test lets them."""

    def __init__(self) -> None:
        self.readings: list[tuple[LargeBody, Done]] = []

    def read(self, large: LargeBody, done: Done) -> Callable[[], None] | None:
        reading = (large, done)
        self.readings.append(reading)
        return lambda: self.readings.remove(reading)

    def finish(self, now: float = 500.0, result: Prompt | Refused | None = None) -> None:
        large, done = self.readings.pop(0)
        done(now, result or read_body(b"".join(large.chunks), large.api))


def sent(config=None, *pools) -> tuple[Conversation, HeldReader]:
    """Send a request with a large body; return its conversation and reader."""
    reader = HeldReader()
    talk = Conversation(*pools, reader=reader)
    step = len(BODY) if config is BUFFERED else 65_536
    talk.send(request_headers(config), *request_bodies(BODY[i : i + step] for i in range(0, len(BODY), step)))
    return talk, reader


@every_mode
def test_large_body_is_answered_when_it_is_read(config):
    talk, reader = sent(config)
    meanwhile = (talk.stream.phase, talk.buffered.held_bytes, list(talk.delivered), talk.in_flight)

    reader.finish()

    assert meanwhile == (Phase.QUEUED, len(BODY), [], 0)
    assert sum(destination(answer) is not None for answer in talk.delivered) == 1
    assert talk.in_flight == 1
    assert talk.stream.phase is Phase.ANSWERED
    assert talk.observer.names() == ["routed", "decided"]


def test_large_body_is_read_for_the_client_of_the_fairness_header():
    reader = HeldReader()
    talk = Conversation(pool(), reader=reader)
    name = "n" * 2000
    talk.send(request_headers(NO_WAIT, x_gateway_inference_fairness_id=name), request_body(BODY))

    assert [large.client for large, _ in reader.readings] == [name[:NAME_CHARACTERS]]


@every_mode
def test_large_body_is_answered_as_if_it_was_read_here(config):
    talk, reader = sent(config)
    reader.finish()
    here = Conversation()
    step = len(BODY) if config is BUFFERED else 65_536
    answers = here.send(request_headers(config), *request_bodies(BODY[i : i + step] for i in range(0, len(BODY), step)))

    assert talk.delivered == answers[-len(talk.delivered) :]


def test_large_body_is_passed_on_in_the_chunks_that_arrived():
    _, reader = sent(NO_WAIT)
    [(large, _)] = reader.readings

    assert large.chunks == tuple(BODY[i : i + 65_536] for i in range(0, len(BODY), 65_536))
    assert large.size_bytes == len(BODY)


def test_full_duplex_body_goes_back_whole_and_in_order():
    talk, reader = sent(DUPLEX)
    talk.send(request_trailers())

    reader.finish()
    headers, *pieces, trailers = talk.delivered

    assert kinds([headers, trailers]) == ["request_headers", "request_trailers"]
    assert b"".join(body for body, _ in sent_back(pieces)) == BODY
    assert not any(last for _, last in sent_back(pieces))
    assert talk.buffered.held_bytes == len(BODY)
    talk.stream.written()
    assert talk.buffered.held_bytes == 0


def test_large_body_with_late_messages_has_them_answered_after_the_pick():
    talk, reader = sent(NO_WAIT)
    bodies = -(-len(BODY) // 65_536)

    answers = talk.send(request_body(b""), request_trailers())
    reader.finish()

    assert answers == []
    assert kinds(talk.delivered) == ["request_headers", *["request_body"] * (bodies + 1), "request_trailers"]


@every_mode
def test_large_body_may_be_queued_for_a_member_after_reading(config):
    talk, reader = sent(config, crowded_pool())
    first = Conversation(picker=talk.picker, now=talk.now)
    first.send(request_headers(NO_WAIT), request_body(chat("long " * 10_000)))

    reader.finish(now=talk.now)
    queued = (talk.stream.phase, list(talk.delivered), talk.held)
    first.close(cancelled=True)

    assert queued == (Phase.QUEUED, [], 1)
    assert any(destination(answer) for answer in talk.delivered)


@every_mode
@pytest.mark.parametrize("cancelled", [False, True])
def test_stream_that_ends_while_its_body_is_read_cancels_the_reading(config, cancelled):
    talk, reader = sent(config)

    talk.close(cancelled=cancelled)

    assert reader.readings == []
    assert (talk.buffered.held_bytes, talk.in_flight, talk.delivered) == (0, 0, [])
    assert talk.observer.events == []


@every_mode
@pytest.mark.parametrize("message", [response_headers(503, end=True), wire.ProcessingRequest()])
def test_request_that_envoy_answers_while_its_body_is_read_is_cancelled(config, message):
    talk, reader = sent(config)

    talk.send(message)

    assert reader.readings == []
    assert (talk.buffered.held_bytes, talk.in_flight) == (0, 0)


def test_stream_that_begins_again_while_its_body_is_read_routes_the_new_request():
    talk, reader = sent(NO_WAIT)

    answers = talk.send(request_headers(NO_WAIT), request_body(chat()))

    assert reader.readings == []
    assert destination(answers[0])
    assert talk.buffered.held_bytes == 0


@every_mode
def test_body_that_takes_too_long_to_read_is_a_bad_request(config):
    talk, reader = sent(config)

    reader.finish(result=invalid_body("the body takes too long to read"))

    assert refused_with(talk.delivered) == 400
    assert talk.stream.ended
    assert talk.buffered.held_bytes == 0
    assert len(talk.observer.of(Rejected)) == 1


def test_pool_that_is_removed_while_a_body_is_read_refuses_its_request():
    talk, reader = sent(NO_WAIT)
    talk.picker.set_pools(400.0, [pool(model="other")])

    reader.finish()

    assert refused_with(talk.delivered) == 404


def test_time_to_decide_on_a_large_body_includes_its_reading():
    talk, reader = sent(NO_WAIT)

    reader.finish(now=talk.now + 2.0)

    assert [decided.seconds for decided in talk.observer.of(Decided)] == [2.0]


@pytest.mark.parametrize("config", MODES.values(), ids=MODES)
def test_small_body_is_read_at_once(config):
    reader = HeldReader()
    talk = Conversation(reader=reader)

    answers = talk.send(request_headers(config), request_body(chat("word " * 10_000)))

    assert any(destination(answer) for answer in answers)
    assert reader.readings == []


def test_body_without_prompt_is_not_read():
    reader = HeldReader()
    talk = Conversation(reader=reader)

    answers = talk.send(request_headers(NO_WAIT, method="GET"), request_body(BODY))

    assert destination(answers[0])
    assert reader.readings == []


def test_pause_of_a_large_body_is_judged_without_parsing():
    talk = Conversation()
    talk.send(request_headers(NO_WAIT), request_body(b'{"model": "m", "tools": [' + b"1," * 50_000, end=False))
    talk.send(request_body(b"1", end=False))

    first_s = talk.stream.deadline_s
    assert talk.stream.on_deadline(first_s) == []
    assert talk.stream.deadline_s > first_s
