"""Tests that chunks of bodies are read, and those of a response answered, as with protobuf."""

import base64
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualmap_extproc.request.stream import Phase
from dualmap_extproc.wire import answers
from dualmap_extproc.wire import ext_proc_pb2 as wire
from dualmap_extproc.wire.chunks import echo, is_empty, request_chunk
from extproc.envoy_messages import (
    DUPLEX,
    NO_WAIT,
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
    return (pieces[0], chunk.end_of_stream) if pieces else None


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


def test_is_empty_is_true_only_for_a_chunk_without_content():
    assert is_empty(response_body(b"", end=True).SerializeToString())
    assert not any(is_empty(response_body(b"x" * size, end=True).SerializeToString()) for size in range(1, 300))


def parsed(data: bytes) -> tuple[bytes, bool] | None:
    """Return a chunk of a request by protobuf; None for another message, or one with other fields that have a value."""
    message = wire.ProcessingRequest.FromString(data)
    if message.WhichOneof("request") != "request_body" or message.metadata_context.filter_metadata:
        return None
    return message.request_body.body, message.request_body.end_of_stream


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("metadata", [False, True])
def test_request_chunk_equals_protobuf_around_every_length_of_prefix(last, metadata):
    for size in (*range(140), *range(16_370, 16_400), *range(2_097_140, 2_097_160), 16 * 1024 * 1024):
        message = request_body(b"\x10" * size, end=last)
        if metadata:
            message.metadata_context.SetInParent()
        data = message.SerializeToString()

        assert request_chunk(data) == request_chunk(memoryview(data)) == parsed(data), size


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_request_chunk_reads_every_recorded_chunk_without_metadata(path):
    streams = json.loads(path.read_text()).values()
    messages = [base64.b64decode(text) for texts in streams for text in texts]

    assert [request_chunk(each) for each in messages] == [parsed(each) for each in messages]


@pytest.mark.parametrize(
    "message",
    [
        request_headers(),
        request_trailers(),
        response_headers(),
        response_body(b"x"),
        with_metadata(request_body(b"x"), "envoy.lb.subset_hint", "key", "value"),
        wire.ProcessingRequest(request_body=wire.HttpBody(body=b"x"), protocol_config=DUPLEX),
        wire.ProcessingRequest(),
    ],
)
def test_request_chunk_leaves_other_messages_to_protobuf(message):
    assert request_chunk(message.SerializeToString()) is None


@given(
    st.one_of(
        st.binary(max_size=40),
        st.binary(max_size=40).map(lambda rest: b"\x22" + rest),
        st.binary(max_size=40).map(lambda rest: b"\x22" + bytes([len(rest)]) + rest),
        st.binary(max_size=20).map(lambda rest: b"\x22" + bytes([len(rest) + 2, 0x0A, len(rest)]) + rest),
        st.binary(max_size=20).map(lambda rest: b"\x22\x03\x0a\x01x" + rest),
        st.binary(max_size=20).map(lambda rest: b"\x22" + b"\xff" * len(rest) + b"\x0a"),
    )
)
def test_request_chunk_of_any_bytes_equals_protobuf(data):
    read = request_chunk(data)

    assert read is None or read == parsed(data)


def test_stream_reads_request_chunks_without_and_with_protobuf_alike():
    def unusual(body: bytes, *, end: bool) -> bytes:
        """Encode the end of the stream before the body."""
        inner = (b"\x10\x01" if end else b"\x10\x00") + wire.HttpBody(body=body).SerializeToString()
        return b"\x22" + bytes([len(inner)]) + inner

    body = chat("hi")
    ways = {
        "usual": lambda piece, end: request_body(piece, end=end).SerializeToString(),
        "unusual": lambda piece, end: unusual(piece, end=end),
    }
    told = {}
    for name, encoded in ways.items():
        talk = Conversation()
        talk.send(request_headers(NO_WAIT))
        pieces = [(body[:20], False), (b"", False), (body[20:], True)]
        answers = [talk.stream.receive(talk.now, encoded(*piece)) for piece in pieces]
        told[name] = (answers, talk.stream.phase, talk.observer.names())

    assert told["usual"] == told["unusual"]
    assert told["usual"][1] is Phase.ANSWERED


def test_stream_ends_the_request_with_a_last_chunk_without_content():
    talk = Conversation()
    talk.send(request_headers(NO_WAIT), request_body(chat()), response_headers())

    talk.send(response_body(b"", end=True))

    assert talk.stream.ended
    assert "first_token" not in talk.observer.names()


def test_stream_sends_no_chunk_of_the_next_request_back():
    talk = Conversation()
    for _ in range(2):
        talk.send(request_headers(DUPLEX), request_body(chat()), response_headers())
        first, second = talk.send(response_body(b"a"), response_body(b"b"))
        pieces = [each.response_body.response.body_mutation.streamed_response.body for each in (first, second)]
        assert pieces == [b"a", b"b"]

    assert talk.observer.names().count("first_token") == 2


def test_stream_echoes_only_chunks_after_the_first_one():
    talk = Conversation()
    for message in (request_headers(DUPLEX), request_body(chat()), response_headers(), response_body()):
        assert talk.stream.echo(talk.now, message.SerializeToString()) is None
        talk.send(message)

    chunk = response_body(b"last", end=True).SerializeToString()
    assert talk.stream.echo(talk.now, chunk) == echo(chunk)[0]
    assert talk.observer.names() == ["routed", "first_token", "finished"]


def test_stream_without_duplex_echoes_nothing():
    talk = Conversation()
    talk.send(request_headers(NO_WAIT), request_body(chat()), response_headers(), response_body())

    assert talk.stream.echo(talk.now, response_body().SerializeToString()) is None
