"""Tests that chunks of a response get the same answers with and without protobuf."""

import base64
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualmap_extproc.wire import answers
from dualmap_extproc.wire import ext_proc_pb2 as wire
from dualmap_extproc.wire.chunks import echo
from extproc.envoy_messages import (
    DUPLEX,
    Conversation,
    chat,
    request_body,
    request_headers,
    request_trailers,
    response_body,
    response_headers,
    response_trailers,
    with_metadata,
)

RECORDED = sorted((Path(__file__).parent / "recorded" / "gateways").glob("*.json"))
LONGEST = 16_370


def expected(message: wire.ProcessingRequest) -> tuple[bytes, bool] | None:
    """Return the answer by protobuf; None for another message than a chunk, and for a chunk with nothing to send."""
    if message.WhichOneof("request") != "response_body":
        return None
    chunk = message.response_body
    pieces = list(answers.response_pieces(chunk.body, 62_000, last=chunk.end_of_stream))
    return (pieces[0].SerializeToString(), chunk.end_of_stream) if pieces else None


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("metadata", [False, True])
def test_echo_equals_protobuf_around_every_length_of_prefix(last, metadata):
    for size in (*range(140), *range(16_340, LONGEST)):
        message = response_body(bytes(size), end=last)
        if metadata:
            with_metadata(message, "envoy.lb", "served", "x" * (size % 300))

        assert echo(memoryview(message.SerializeToString())) == expected(message), size


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_echo_answers_every_recorded_chunk(path):
    streams = json.loads(path.read_text()).values()
    messages = [base64.b64decode(text) for texts in streams for text in texts]

    assert [echo(each) for each in messages] == [expected(wire.ProcessingRequest.FromString(each)) for each in messages]


@pytest.mark.parametrize(
    "message",
    [
        request_headers(),
        request_body(chat()),
        request_trailers(),
        response_headers(),
        response_trailers(),
        response_body(b""),
        response_body(bytes(1 << 14)),
        wire.ProcessingRequest(response_body=wire.HttpBody(body=b"x"), protocol_config=DUPLEX),
        wire.ProcessingRequest(response_body=wire.HttpBody(body=b"x"), observability_mode=True),
        wire.ProcessingRequest(),
    ],
)
def test_echo_leaves_other_messages_to_protobuf(message):
    assert echo(message.SerializeToString()) is None


@given(
    st.one_of(
        st.binary(max_size=40),
        st.binary(max_size=40).map(lambda rest: b"\x2a" + bytes([len(rest)]) + rest),
        st.binary(max_size=20).map(lambda rest: b"\x2a" + bytes([len(rest) + 2, 0x0A, len(rest)]) + rest),
        st.binary(max_size=20).map(lambda rest: b"\x2a\x03\x0a\x01x" + rest),
    )
)
def test_echo_of_any_bytes_answers_only_valid_chunks(data):
    answered = echo(data)

    if answered is None:
        return
    # The metadata need not be valid, because nothing of it is used.
    message = wire.ProcessingRequest.FromString(data[: 2 + data[1]])
    assert answered == expected(message)


def test_stream_echoes_only_after_the_first_chunk():
    talk = Conversation()
    messages = (request_headers(DUPLEX), request_body(chat()), response_headers(), response_body())
    for message in messages:
        assert talk.stream.echo(talk.now, message.SerializeToString()) is None
        talk.send(message)

    assert talk.stream.echo(talk.now, response_body(end=True).SerializeToString()) is not None
    assert talk.observer.names() == ["routed", "first_token", "finished"]


def test_stream_echoes_no_chunk_of_the_next_request():
    talk = Conversation()
    for _ in range(2):
        talk.send(request_headers(DUPLEX))
        assert talk.stream.echo(talk.now, response_body().SerializeToString()) is None
        talk.send(request_body(chat()), response_headers(), response_body())


def test_stream_without_duplex_echoes_nothing():
    talk = Conversation()
    talk.send(request_headers(), request_body(chat()), response_headers(), response_body())

    assert talk.stream.echo(talk.now, response_body().SerializeToString()) is None
