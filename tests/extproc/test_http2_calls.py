"""Tests of gRPC on HTTP/2: messages and their prefixes, statuses, deadlines, handlers."""

from collections.abc import Iterable

import pytest

from dualmap_extproc.settings import Limits
from dualmap_extproc.transport.http2 import frames
from dualmap_extproc.transport.http2.frames import ErrorCode
from dualmap_extproc.transport.http2.hpack import Header
from dualmap_extproc.transport.http2.limits import Http2Limits
from dualmap_extproc.transport.http2.status import MESSAGE_BYTES, Status, encoded
from dualmap_extproc.transport.server import http2_limits
from extproc.http2_client import (
    METHOD,
    REQUEST,
    Client,
    Recorder,
    data,
    headers,
    message,
    nothing,
    resets_of,
    status_of,
)


def replaced(name: bytes, value: bytes) -> list[Header]:
    return [(each, value if each == name else old) for each, old in REQUEST]


def echo(handler: Recorder, content: bytes) -> None:
    handler.call.send(content)


def test_first_message_is_sent_with_the_response_headers() -> None:
    client = Client(on_message=echo)
    output = client.asked(headers(1), data(1, message(b"one") + message(b"two"), end=True))
    assert [each.kind for each in output] == [frames.HEADERS, frames.DATA, frames.DATA, frames.HEADERS]
    assert client.decoded(output[0]) == {b":status": b"200", b"content-type": b"application/grpc"}
    assert [each.payload for each in output[1:3]] == [message(b"one"), message(b"two")]
    assert client.decoded(output[3]) == {b"grpc-status": b"0"}
    assert output[3].flags & frames.END_STREAM


def test_first_header_block_of_a_connection_empties_the_encoders_table() -> None:
    client = Client(on_message=echo)
    first = client.asked(headers(1), data(1, message(b"one"), end=True))[0]
    second = client.asked(headers(3), data(3, message(b"one"), end=True))[0]
    assert first.payload == b"\x20" + second.payload


def test_call_without_messages_gets_only_trailers() -> None:
    client = Client()
    (only,) = client.asked(headers(1, end=True))
    assert only.flags & frames.END_STREAM
    expected = {b":status": b"200", b"content-type": b"application/grpc", b"grpc-status": b"0"}
    assert client.decoded(only) == expected


def test_status_and_message_are_sent_in_the_trailers() -> None:
    client = Client(on_half_closed=lambda handler: handler.call.finish(Status.NOT_FOUND, "no model 100% ü\n"))
    output = client.asked(headers(1, end=True))
    assert status_of(client, output) == (5, "no model 100%25 %C3%BC%0A")


def test_long_status_message_is_cut_at_a_character() -> None:
    assert encoded("x" * 5000) == b"x" * MESSAGE_BYTES
    cut = encoded("é" * 5000)
    assert cut == b"%C3%A9" * (MESSAGE_BYTES // 6)
    assert encoded("\udc80") == b"?"


@pytest.mark.parametrize("size", [0, 1, 5, 100, 16_379, 16_380, 40_000])
def test_message_is_received_whole_in_frames_of_any_size(size: int) -> None:
    content = bytes(each % 251 for each in range(size))
    whole = message(content)
    for piece in (1, 3, 5, 7, 1000, 16_384):
        if len(whole) // piece < 5000:
            client = Client()
            client.send(headers(1), *(data(1, whole[at : at + piece]) for at in range(0, len(whole), piece)))
            assert client.calls[0].received == [content]
            assert client.server.unfinished_bytes == 0


def test_several_messages_in_one_frame_are_received_in_order() -> None:
    client = Client()
    contents = [b"", b"one", b"", b"x" * 500, b"two"]
    whole = b"".join(map(message, contents))
    client.send(headers(1), data(1, whole[:7]), data(1, whole[7:300]), data(1, whole[300:]))
    assert client.calls[0].received == contents


def test_message_is_delivered_before_the_stream_ends() -> None:
    client = Client()
    client.send(headers(1), data(1, message(b"whole") + b"\0\0"))
    assert client.calls[0].received == [b"whole"]


def refused(fields: Iterable[Header], *, end: bool = False) -> tuple[Client, list[frames.ErrorCode | int]]:
    client = Client()
    output = client.asked(headers(1, fields, end=end))
    fields_sent = client.decoded(output[0])
    assert output[0].flags & frames.END_STREAM
    assert resets_of(output) == ([] if end else [(1, ErrorCode.NO_ERROR)])
    return client, [int(fields_sent[b":status"]), int(fields_sent.get(b"grpc-status", b"-1"))]


def test_unknown_method_is_unimplemented() -> None:
    assert refused(replaced(b":path", b"/test.Service/Other"))[1] == [200, 12]


def test_other_http_method_gets_405() -> None:
    assert refused(replaced(b":method", b"GET"), end=True)[1] == [405, -1]


@pytest.mark.parametrize("value", [b"application/json", b"application/grpc-web", b"application/grpc+json", b""])
def test_other_content_type_gets_415(value: bytes) -> None:
    assert refused(replaced(b"content-type", value))[1] == [415, -1]


def test_frames_of_a_refused_call_are_ignored() -> None:
    client, _ = refused(replaced(b":path", b"/test.Service/Other"))
    assert client.asked(data(1, message(b"x"), end=True)) == []
    assert client.counters.late_frames == 1


@pytest.mark.parametrize("value", [b"application/grpc", b"application/grpc+proto", b"application/grpc;charset=utf-8"])
def test_content_types_of_grpc_are_served(value: bytes) -> None:
    client = Client()
    client.send(headers(1, replaced(b"content-type", value), end=True))
    assert client.calls[0].half_closes == 1


def test_compressed_message_gets_the_encodings_that_are_accepted() -> None:
    client = Client()
    output = client.asked(headers(1), data(1, b"\x01\0\0\0\x01x"), data(1, message(b"late")))
    trailers = client.decoded(output[0])
    assert trailers[b"grpc-status"] == b"%d" % Status.UNIMPLEMENTED
    assert trailers[b"grpc-accept-encoding"] == b"identity"
    assert client.calls[0].cancels == 1
    assert client.calls[0].received == []


@pytest.mark.parametrize("split", [5, 3])
def test_message_above_the_limit_is_refused_by_its_prefix(split: int) -> None:
    client = Client(Http2Limits(message_bytes=100))
    whole = message(bytes(101))
    output = client.asked(headers(1), data(1, whole[:split]), data(1, whole[split:10]))
    assert status_of(client, output) == (Status.RESOURCE_EXHAUSTED, "message of 101 bytes, more than 100")
    assert client.calls[0].cancels == 1


def test_message_above_the_limit_in_one_frame_is_refused() -> None:
    client = Client(Http2Limits(message_bytes=100))
    output = client.asked(headers(1), data(1, message(bytes(100)) + message(bytes(101))))
    assert status_of(client, output)[0] == Status.RESOURCE_EXHAUSTED
    assert len(client.calls[0].received) == 1


@pytest.mark.parametrize("piece", [b"\0\0", message(b"12345")[:7]])
def test_stream_that_ends_within_a_message_is_an_internal_error(piece: bytes) -> None:
    client = Client()
    output = client.asked(headers(1), data(1, piece), data(1, end=True))
    assert status_of(client, output) == (Status.INTERNAL, "the stream ended within a message")
    assert (client.calls[0].half_closes, client.calls[0].cancels) == (0, 1)
    assert client.server.unfinished_bytes == 0


def test_unfinished_messages_above_the_limit_end_the_call_that_exceeds_it() -> None:
    client = Client(Http2Limits(unfinished_bytes=3000))
    part = message(bytes(5000))[:1500]
    output = client.asked(*(headers(each) + data(each, part) for each in (1, 3, 5)))
    assert [call.cancels for call in client.calls] == [0, 0, 1]
    assert status_of(client, output, 5)[0] == Status.RESOURCE_EXHAUSTED
    assert client.server.unfinished_bytes == 3000


def test_eight_parallel_bodies_of_the_default_limit_all_arrive() -> None:
    client = Client(http2_limits(Limits()), on_message=lambda handler, _: handler.received.clear())
    body = message(bytes(Limits().body_bytes))
    streams = range(1, 17, 2)
    client.send(*(headers(each) for each in streams))
    for at in range(0, len(body), frames.FRAME_BYTES):
        piece = body[at : at + frames.FRAME_BYTES]
        for each in streams:
            client.send(data(each, piece, end=at + len(piece) == len(body)))
        client.taken()
    assert [(call.half_closes, call.cancels) for call in client.calls] == [(1, 0)] * 8
    assert client.server.unfinished_bytes == 0


@pytest.mark.parametrize(("buffered_bytes", "cancels"), [(2200, [0, 0, 0, 0]), (1000, [0, 0, 1, 1])])
def test_unfinished_bodies_are_bounded_by_the_stored_bodies_and_one_message(
    buffered_bytes: int, cancels: list[int]
) -> None:
    client = Client(http2_limits(Limits(body_bytes=400, buffered_bytes=buffered_bytes)))
    part = message(bytes(1000))[:800]
    client.send(*(headers(each) + data(each, part) for each in (1, 3, 5, 7)))
    assert [call.cancels for call in client.calls] == cancels


def raising(*_: object) -> None:
    raise ValueError("planted")


def test_handler_that_raises_ends_only_its_call() -> None:
    client = Client(on_message=lambda handler, content: raising() if content == b"bad" else echo(handler, content))
    output = client.asked(headers(1), headers(3), data(1, message(b"bad")), data(3, message(b"good"), end=True))
    assert status_of(client, output, 1) == (Status.INTERNAL, "internal error")
    assert [call.cancels for call in client.calls] == [1, 0]
    assert [str(error) for error in client.failures] == ["planted"]
    assert client.counters.failed_handlers == 1
    assert client.calls[1].half_closes == 1


def test_handler_that_raises_at_the_half_close_ends_only_its_call() -> None:
    client = Client(on_half_closed=raising)
    assert status_of(client, client.asked(headers(1, end=True)))[0] == Status.INTERNAL


def test_factory_that_raises_ends_only_its_call() -> None:
    client = Client()
    client.server._methods = {METHOD: raising}
    assert status_of(client, client.asked(headers(1, end=True)))[0] == Status.INTERNAL
    assert not client.server.closing


def test_call_answers_outside_a_read_and_asks_once_for_the_output() -> None:
    client = Client()
    client.asked(headers(1))
    call = client.calls[0].call
    call.send(b"one")
    call.send(b"two")
    call.finish()
    assert client.outputs_signalled == 1
    output = client.taken()
    assert [each.kind for each in output] == [1, 0, 0, 1, 3]
    assert call.ended


def test_answers_within_a_read_do_not_ask_for_the_output() -> None:
    client = Client(on_message=echo)
    client.asked(headers(1), data(1, message(b"x"), end=True))
    assert client.outputs_signalled == 0


def test_call_that_exceeds_its_grpc_timeout_is_cancelled() -> None:
    client = Client(on_half_closed=nothing)
    client.asked(headers(1, (*REQUEST, (b"grpc-timeout", b"250m"))), headers(3, (*REQUEST, (b"grpc-timeout", b"2S"))))
    assert client.server.next_deadline() == 0.25
    client.server.on_deadline(0.2)
    assert client.calls[0].cancels == 0
    client.server.on_deadline(0.25)
    assert status_of(client, client.taken())[0] == Status.DEADLINE_EXCEEDED
    assert [call.cancels for call in client.calls] == [1, 0]
    assert client.server.next_deadline() == 2.0


def test_finished_call_has_no_deadline() -> None:
    client = Client()
    client.asked(headers(1, (*REQUEST, (b"grpc-timeout", b"1S")), end=True))
    client.server.on_deadline(1.0)
    assert client.taken() == []
    assert client.server.next_deadline() == 30.0


@pytest.mark.parametrize("value", [b"1", b"S", b"123456789S", b"1x", b"-1S"])
def test_invalid_grpc_timeout_is_no_timeout(value: bytes) -> None:
    client = Client()
    client.asked(headers(1, (*REQUEST, (b"grpc-timeout", value))))
    assert client.server.next_deadline() == 30.0


def test_message_of_one_frame_is_not_copied() -> None:
    seen: list[object] = []

    class Handler(Recorder):
        def message(self, now: float, data: memoryview | bytes) -> None:
            seen.append(data)

    client = Client()
    client.server._methods = {METHOD: lambda call: Handler(call, nothing, nothing)}
    read = bytearray(headers(1) + data(1, message(b"content")))
    client.server.receive(0.0, memoryview(read))
    assert isinstance(seen[0], memoryview)
    assert seen[0].obj is read


def test_bytes_of_a_read_are_not_used_afterwards() -> None:
    client = Client()
    whole = headers(1) + data(1, message(b"x" * 500)) + data(1, message(b"y" * 300)[:200]) + data(1, bytes(105))
    for split in range(1, len(whole), 7):
        client = Client()
        for piece in (whole[:split], whole[split:]):
            read = bytearray(piece)
            client.server.receive(0.0, memoryview(read))
            read[:] = b"\xff" * len(read)
        assert client.calls[0].received == [b"x" * 500, b"y" * 195 + bytes(105)]
