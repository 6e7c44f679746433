"""Tests of queued requests: the stream answers no message before the release, then all messages in order."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualmap_extproc.settings import Limits
from extproc.envoy_messages import (
    BUFFERED,
    DUPLEX,
    MODES,
    NO_WAIT,
    STREAMED,
    Conversation,
    chat,
    crowded_pool,
    destination,
    headers_set,
    kinds,
    metadata_of,
    mutation_of,
    refused_with,
    request_bodies,
    request_body,
    request_headers,
    request_trailers,
    response_body,
    response_headers,
)

every_mode = pytest.mark.parametrize("config", MODES.values(), ids=MODES)
SHORT = chat()
# A prompt with two minutes of prefill on the slow engine.
LONG = chat("long " * 10_000, stream=True)


class Crowd:
    """A pool with one busy engine, and a conversation with a request that will be queued."""

    def __init__(self, *, limits: Limits | None = None, **queue) -> None:
        self.first = Conversation(crowded_pool(**queue), limits=limits)
        self.first.send(request_headers(NO_WAIT), request_body(LONG))
        self.talk = Conversation(picker=self.first.picker, limits=limits)
        self.names = self.first.observer.names

    def hold(self, config, *, chunks=(SHORT,)) -> list:
        """Send a request; return the immediate answers."""
        answers = self.talk.send(request_headers(config), *request_bodies(chunks))
        assert self.talk.held == 1
        return answers

    def release(self) -> list:
        """End the current prefill; return the queued request's answers."""
        self.first.send(response_headers(), response_body())
        assert self.talk.held == 0
        return self.talk.delivered


@every_mode
def test_dispatched_queued_request_gets_the_usual_responses(config):
    crowd, calm = Crowd(), Conversation(crowded_pool())
    expected = calm.send(request_headers(config), request_body(chat()))

    at_once = crowd.hold(config)
    assert crowd.talk.delivered == []
    later = crowd.release()

    assert kinds(at_once + later) == kinds(expected)
    assert [destination(each) for each in at_once + later] == [destination(each) for each in expected]
    assert later
    assert crowd.names() == ["routed", "first_token", "routed", "waited"]


def test_queued_request_gets_responses_only_to_waiting_headers():
    assert [kinds(Crowd().hold(config)) for config in (NO_WAIT, DUPLEX)] == [[], []]
    assert [kinds(Crowd().hold(config)) for config in (BUFFERED, STREAMED)] == [["request_headers"]] * 2


def test_queued_duplex_body_is_sent_back_complete():
    crowd = Crowd(limits=Limits(chunk_bytes=16))
    crowd.hold(DUPLEX, chunks=[chat()[:9], chat()[9:]])

    pieces = [each.request_body.response.body_mutation.streamed_response for each in crowd.release()[1:]]

    assert b"".join(piece.body for piece in pieces) == chat()
    assert [piece.end_of_stream for piece in pieces] == [False] * (len(pieces) - 1) + [True]


@pytest.mark.parametrize("config", [NO_WAIT, DUPLEX, STREAMED, None], ids=["no-wait", "duplex", "streamed", "unsaid"])
def test_trailers_of_a_queued_request_are_answered_as_usual(config):
    crowd, calm = Crowd(), Conversation(crowded_pool())
    messages = request_headers(config), request_body(chat(), end=False), request_trailers()
    expected = calm.send(*messages)

    answers = crowd.talk.send(*messages)
    assert "request_trailers" not in kinds(answers)
    answers += crowd.release()

    assert kinds(answers) == kinds(expected)
    assert kinds(answers)[-1] == "request_trailers"
    assert [metadata_of(each).keys() for each in answers] == [metadata_of(each).keys() for each in expected]
    assert ["x-dualmap-no-retry" in str(mutation_of(each)) for each in answers] == [
        "x-dualmap-no-retry" in str(mutation_of(each)) for each in expected
    ]


def test_request_queued_after_silence_disables_retries():
    crowd = Crowd()
    crowd.talk.send(request_headers(NO_WAIT), request_body(chat(), end=False))
    assert crowd.talk.stream.deadline_s is not None

    assert crowd.talk.stream.on_deadline(crowd.talk.stream.deadline_s) == []
    assert crowd.talk.held == 1

    assert headers_set(crowd.release()[0])["x-dualmap-no-retry"] == "1"


@every_mode
def test_queued_request_sets_no_stream_deadline(config):
    crowd = Crowd()
    crowd.hold(config)
    assert crowd.talk.stream.deadline_s is None

    crowd.talk.send(request_body(b""))

    assert crowd.talk.stream.deadline_s is None


@pytest.mark.parametrize(("config", "answered"), [(NO_WAIT, 3), (BUFFERED, 3), (STREAMED, 3), (DUPLEX, 1)])
def test_bodies_during_queueing_are_answered_after_the_pick(config, answered):
    crowd = Crowd()
    crowd.hold(config)

    assert crowd.talk.send(request_body(b"", end=False), request_body(b"")) == []
    later = crowd.release()

    assert kinds(later).count("request_body") == answered
    assert [destination(each) is not None for each in later] == [True] + [False] * (len(later) - 1)
    assert crowd.names().count("routed") == 2


@every_mode
def test_trailers_during_queueing_are_answered_last(config):
    crowd = Crowd()
    crowd.hold(config)

    assert crowd.talk.send(request_trailers()) == []

    assert kinds(crowd.release())[-1] == "request_trailers"


@every_mode
@pytest.mark.parametrize("cancelled", [True, False])
def test_stream_closed_during_queueing_removes_its_request(config, cancelled):
    crowd = Crowd()
    crowd.hold(config)

    crowd.talk.close(cancelled=cancelled)

    assert crowd.talk.held == 0
    assert crowd.names() == ["routed", "waited"]
    assert crowd.release() == []
    assert crowd.names() == ["routed", "waited", "first_token"]


@every_mode
def test_response_before_request_leaves_no_queued_request(config):
    """Envoy never sends such a response, but the end of the stream must remove the request from the queue."""
    crowd = Crowd()
    crowd.talk.send(response_headers(200))
    crowd.talk.send(request_body(SHORT))
    assert crowd.talk.held == 1

    crowd.talk.close()

    assert crowd.talk.held == 0
    assert crowd.release() == []


@every_mode
def test_response_during_queueing_removes_the_queued_request(config):
    """After a timeout, Envoy's own response passes through the stream like other responses."""
    crowd = Crowd()
    crowd.hold(config)

    answers = crowd.talk.send(response_headers(504, end=True))

    assert kinds(answers) == ["response_headers"]
    assert crowd.talk.held == 0
    assert crowd.release() == []


def test_second_request_of_a_stream_replaces_the_queued_request():
    crowd = Crowd()
    crowd.hold(NO_WAIT)

    crowd.hold(NO_WAIT, chunks=[chat("another"), b""])

    assert kinds(crowd.release()) == ["request_headers", "request_body", "request_body"]
    assert crowd.names() == ["routed", "waited", "first_token", "routed", "waited"]


@every_mode
def test_request_queued_beyond_max_wait_is_rejected(config):
    crowd = Crowd(max_wait_s=20.0)
    crowd.hold(config)

    crowd.talk.picker.on_deadline(crowd.talk.now + 20.0)

    assert refused_with(crowd.talk.delivered) == 429
    assert int(headers_set(crowd.talk.delivered[0])["retry-after"]) >= 1
    assert json.loads(crowd.talk.delivered[0].immediate_response.body)["error"]["code"] == "waited_too_long"
    assert crowd.talk.stream.ended
    assert crowd.talk.held == 0
    crowd.talk.close()
    assert crowd.names() == ["routed", "refused", "waited"]


@every_mode
def test_request_to_a_full_queue_is_rejected(config):
    crowd = Crowd(max_held=0)

    answers = crowd.talk.send(request_headers(config), request_body(chat()))

    assert refused_with(answers[-1:]) == 429
    assert int(headers_set(answers[-1])["retry-after"]) >= 1
    assert crowd.names() == ["routed", "refused"]


@every_mode
def test_dispatched_queued_request_finishes_as_usual(config):
    crowd = Crowd()
    crowd.hold(config)
    crowd.release()
    assert crowd.talk.in_flight == 2

    crowd.talk.send(response_headers(), response_body(end=True))

    assert crowd.names()[-2:] == ["first_token", "finished"]
    assert crowd.talk.in_flight == 1


messages = st.one_of(
    st.builds(request_headers, st.sampled_from(list(MODES.values()))),
    st.builds(request_body, st.sampled_from([chat(), LONG, b"", b"{"]), end=st.booleans()),
    st.builds(request_trailers),
    st.builds(response_headers, st.sampled_from([200, 503])),
    st.builds(response_body, end=st.booleans()),
)
whole = st.builds(
    lambda config, body: [request_headers(config), request_body(body)],
    st.sampled_from(list(MODES.values())),
    st.sampled_from([chat(), LONG]),
)
steps = st.tuples(st.integers(0, 4), st.one_of(whole, whole, st.lists(messages, max_size=2), st.just("close")))


@given(st.lists(steps, max_size=30), st.sampled_from([0, 1, 3]), st.sampled_from([5.0, 1000.0]), st.booleans())
def test_stream_of_any_steps_with_queueing_leaves_no_request_open(steps, max_held, max_wait_s, empty):
    """Each request gets at most one pick, and no pick after its stream's end.

    The picker keeps no state of the request.
    """
    queue = {"max_held": max_held, "max_wait_s": max_wait_s, "hold_when_empty": True}
    talk = Conversation(crowded_pool(members=0 if empty else 2, **queue))
    streams = [Conversation(picker=talk.picker) for _ in range(5)]
    told: list[list] = [[] for _ in streams]
    begun = [0] * len(streams)
    now = 100.0
    for index, step in steps:
        now += 1.0
        one = streams[index]
        one.now = now
        if step == "close":
            one.close(cancelled=True)
            one.again()
            # Messages of the ended stream do not affect the next one.
            told[index], begun[index], one.delivered[:] = [], 0, []
        else:
            kinds = kinds_of_requests(step)
            # A body or trailers without earlier headers also count as a request.
            parts = [kind for kind in kinds if kind.startswith("request_")]
            headless = not begun[index] and parts[:1] not in ([], ["request_headers"])
            begun[index] += kinds.count("request_headers") + headless
            told[index] += one.send(*step)
        deadline_s = talk.picker.next_deadline()
        if deadline_s is not None and deadline_s <= now:
            talk.picker.on_deadline(now)
        picks = [each for each in told[index] + one.delivered if "x-gateway-destination" in str(each)]
        assert len(picks) <= begun[index]
    for one in streams:
        one.close(cancelled=True)
        one.delivered[:] = []
    while (deadline_s := talk.picker.next_deadline()) is not None:
        talk.picker.on_deadline(deadline_s)

    names = talk.observer.names()
    assert (talk.held, talk.in_flight, talk.pending_tokens) == (0, 0, 0)
    assert all(one.delivered == [] for one in streams)
    assert names.count("routed") == sum(
        names.count(end) for end in ("finished", "rejected", "aborted", "failed", "expired")
    )


def kinds_of_requests(messages) -> list[str]:
    return [message.WhichOneof("request") for message in messages]
