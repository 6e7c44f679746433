"""Tests that a stream accepts any messages in any order, and that the picker keeps no ended request."""

from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from dualmap_extproc.request.buffered import BufferedBodies
from dualmap_extproc.settings import Limits
from dualmap_extproc.wire import ext_proc_pb2 as wire
from extproc.envoy_messages import (
    MODES,
    Conversation,
    chat,
    decoded,
    kinds,
    pool,
    request_body,
    request_headers,
    request_trailers,
    response_body,
    response_headers,
    response_trailers,
    with_metadata,
    with_subset,
)

endpoints = st.sampled_from(["10.0.0.0:8000", "10.0.0.1:8000", "10.0.0.1", "", "nonsense", "\x00,,"])
subsets = st.one_of(endpoints, st.lists(endpoints, max_size=3))
bodies = st.one_of(
    st.just(chat()),
    st.builds(chat, st.text(max_size=40)),
    st.just(chat(model="unknown")),
    st.integers(0, 60).map(lambda cut: chat()[:cut]),
    st.integers(0, 60).map(lambda cut: chat()[cut:]),
    st.binary(max_size=40),
    st.just(b"x" * 3000),
)
configs = st.one_of(
    st.sampled_from(list(MODES.values())),
    st.builds(
        wire.ProtocolConfiguration,
        request_body_mode=st.integers(0, 7),
        response_body_mode=st.integers(0, 7),
        send_body_without_waiting_for_header_response=st.booleans(),
    ),
)
headers = st.builds(
    request_headers,
    configs,
    method=st.sampled_from(["POST", "GET", "PUT", "", "\N{SNOWMAN}"]),
    end=st.booleans(),
    content_length=st.sampled_from(["", "0", "50", "2001", "-1", "9" * 30]),
)
messages = st.one_of(
    headers,
    st.builds(with_subset, headers, subsets),
    st.builds(request_body, bodies, end=st.booleans()),
    st.builds(with_subset, st.builds(request_body, bodies), subsets),
    st.builds(request_trailers),
    st.builds(
        response_headers,
        st.sampled_from([100, 200, 204, 404, 500, "", "2xx"]),
        end=st.booleans(),
        served=st.none() | endpoints,
        content_type=st.sampled_from(["text/event-stream", "application/json", ""]),
    ),
    st.builds(response_body, st.binary(max_size=30), end=st.booleans()),
    st.builds(response_trailers),
    st.builds(wire.ProcessingRequest),
    st.builds(with_metadata, st.builds(request_trailers), st.text(max_size=5), st.text(max_size=5), subsets),
)


@given(
    st.lists(st.tuples(st.lists(messages, max_size=12), st.booleans()), min_size=1, max_size=4),
    st.integers(0, 3),
)
def test_stream_of_any_messages_leaves_no_request_open(streams, members):
    talk = Conversation(pool(members=members, max_body_bytes=2000), limits=Limits(chunk_bytes=7))
    for sent, cancelled in streams:
        talk.again()
        for message in sent:
            ended = talk.stream.ended
            answers = talk.send(message)
            if talk.stream.deadline_s is not None:
                answers += decoded(talk.stream.on_deadline(talk.stream.deadline_s))
            assert not (ended and answers)
            assert "immediate_response" not in kinds(answers)[:-1]
            for answer in answers:
                answer.SerializeToString()
        talk.close(cancelled=cancelled)

    # Only the state for the access log may remain, and this state expires.
    while (deadline_s := talk.picker.next_deadline()) is not None:
        talk.picker.on_deadline(deadline_s)

    names = talk.observer.names()
    assert (talk.in_flight, talk.pending_tokens) == (0, 0)
    assert names.count("routed") == sum(
        names.count(end) for end in ("finished", "rejected", "aborted", "failed", "expired")
    )


@given(st.lists(st.tuples(st.integers(0, 3), messages | st.booleans()), max_size=40))
def test_streams_in_any_order_keep_the_bound_on_stored_bodies(steps):
    """A step is a message of a stream, or the stream's end; another stream then takes its place."""
    first = Conversation(pool(max_body_bytes=2000), limits=Limits(chunk_bytes=7))
    buffered = BufferedBodies(3500)
    talks = [Conversation(picker=first.picker, buffered=buffered) for _ in range(4)]
    for number, step in steps:
        talk = talks[number]
        if isinstance(step, bool):
            talk.close(cancelled=step)
            talk.again()
        else:
            talk.send(step)
        assert buffered.held_bytes == sum(each.stream.held_bytes for each in talks) <= 3500
        assert all(each.stream.deadline_s is None for each in talks if each.stream.ended)
    for talk in talks:
        talk.close()

    assert buffered.held_bytes == 0
    assert not buffered._arriving


@given(st.lists(messages, max_size=12))
def test_stream_without_response_body_leaves_no_request_open(sent):
    talk = Conversation(pool(max_body_bytes=2000))
    talk.send(*(message for message in sent if message.WhichOneof("request") != "response_body"))
    talk.close(cancelled=True)

    assert (talk.in_flight, talk.pending_tokens) == (0, 0)


@given(st.binary(max_size=200))
def test_stream_of_any_parsable_bytes_raises_no_error(data):
    try:
        message = wire.ProcessingRequest.FromString(data)
    except DecodeError:
        return
    talk = Conversation()
    talk.send(message)
    talk.close()

    assert talk.in_flight == 0
