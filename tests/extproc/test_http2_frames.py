"""Tests of each type of frame: what the server does, and which errors end the stream or the connection."""

from struct import pack

import pytest

from dualmap_extproc.transport.http2 import frames
from dualmap_extproc.transport.http2.frames import (
    ACK,
    END_HEADERS,
    END_STREAM,
    PADDED,
    PRIORITIZED,
    SETTINGS_ACK,
    ErrorCode,
    ping,
    rst_stream,
    window_update,
)
from dualmap_extproc.transport.http2.header_blocks import OPENINGS_MAX
from dualmap_extproc.transport.http2.hpack import encode
from dualmap_extproc.transport.http2.limits import Http2Limits
from extproc.http2_client import (
    METHOD,
    NEWEST,
    REQUEST,
    STORE_A,
    STORE_B,
    Client,
    Frame,
    data,
    frame,
    goaway_of,
    headers,
    message,
    resets_of,
    settings,
    with_path,
)


def echo(client_or_handler: object, content: bytes) -> None:
    client_or_handler.call.send(content)  # type: ignore[attr-defined]


def test_server_sends_its_settings_and_window_at_once() -> None:
    client = Client(greet=False)
    first, second = client.taken()
    limits = Http2Limits()
    assert first == Frame(frames.SETTINGS, 0, 0, first.payload)
    values = dict(frames.SETTING.iter_unpack(first.payload))
    assert values == {3: limits.streams, 4: limits.stream_window_bytes, 6: limits.header_list_bytes}
    assert (second.kind, second.stream_id) == (frames.WINDOW_UPDATE, 0)
    assert second.number == limits.connection_window_bytes - 65_535


def test_server_acknowledges_settings() -> None:
    client = Client(greet=False)
    client.taken()
    assert client.asked(frames.PREFACE, settings((3, 100), (77, 1))) == [Frame(frames.SETTINGS, ACK, 0, b"")]


@pytest.mark.parametrize("pieces", [b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nXX\r\n\r\n", b"\x16\x03\x01"])
def test_server_rejects_a_wrong_preface(pieces: bytes) -> None:
    client = Client(greet=False)
    assert goaway_of(client.asked(pieces)) is ErrorCode.PROTOCOL_ERROR
    assert client.server.closing


@pytest.mark.parametrize("first", [headers(), ping(b"12345678"), window_update(0, 5000), SETTINGS_ACK, data(1, b"x")])
def test_server_rejects_a_first_frame_that_is_not_settings(first: bytes) -> None:
    client = Client(greet=False)
    assert goaway_of(client.asked(frames.PREFACE, first)) is ErrorCode.PROTOCOL_ERROR


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (frame(frames.SETTINGS, 0, 0, b"12345"), ErrorCode.FRAME_SIZE_ERROR),
        (frame(frames.SETTINGS, ACK, 0, bytes(6)), ErrorCode.FRAME_SIZE_ERROR),
        (frame(frames.SETTINGS, 0, 1), ErrorCode.PROTOCOL_ERROR),
        (settings((2, 2)), ErrorCode.PROTOCOL_ERROR),
        (settings((4, 2**31)), ErrorCode.FLOW_CONTROL_ERROR),
        (settings((5, 16_383)), ErrorCode.PROTOCOL_ERROR),
        (settings((5, 2**24)), ErrorCode.PROTOCOL_ERROR),
        (headers(2), ErrorCode.PROTOCOL_ERROR),
        (headers(0), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.HEADERS, 0, 0, b"\x82"), ErrorCode.PROTOCOL_ERROR),
        (headers(5) + headers(3), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.HEADERS, 0, 1, b"\x82") + data(1, b"x"), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.HEADERS, 0, 1, b"\x82") + ping(b"12345678"), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.HEADERS, 0, 1, b"\x82") + frame(99, 0, 0, b"x"), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.HEADERS, 0, 1, b"\x82") + frame(9, END_HEADERS, 3, b"\x82"), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.HEADERS, END_HEADERS, 1, b"\xff"), ErrorCode.COMPRESSION_ERROR),
        (frame(frames.HEADERS, END_HEADERS | PADDED, 1, b"\x05abc"), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.HEADERS, END_HEADERS | PADDED, 1, b""), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.HEADERS, END_HEADERS | PRIORITIZED, 1, b"1234"), ErrorCode.FRAME_SIZE_ERROR),
        (frame(frames.CONTINUATION, END_HEADERS, 1, b"\x82"), ErrorCode.PROTOCOL_ERROR),
        (data(0, b"x"), ErrorCode.PROTOCOL_ERROR),
        (data(1, b"x"), ErrorCode.PROTOCOL_ERROR),
        (data(2, b"x"), ErrorCode.PROTOCOL_ERROR),
        (headers(1) + frame(frames.DATA, PADDED, 1, b"\x03ab"), ErrorCode.PROTOCOL_ERROR),
        (headers(1) + frame(frames.DATA, PADDED, 1, b""), ErrorCode.PROTOCOL_ERROR),
        (window_update(0, 0), ErrorCode.PROTOCOL_ERROR),
        (window_update(0, 2**31 - 1), ErrorCode.FLOW_CONTROL_ERROR),
        (window_update(1, 5000), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.WINDOW_UPDATE, 0, 0, b"123"), ErrorCode.FRAME_SIZE_ERROR),
        (frame(frames.PING, 0, 0, b"1234567"), ErrorCode.FRAME_SIZE_ERROR),
        (frame(frames.PING, 0, 1, b"12345678"), ErrorCode.PROTOCOL_ERROR),
        (rst_stream(0, 8), ErrorCode.PROTOCOL_ERROR),
        (rst_stream(1, 8), ErrorCode.PROTOCOL_ERROR),
        (headers(1) + frame(frames.RST_STREAM, 0, 1, b"123"), ErrorCode.FRAME_SIZE_ERROR),
        (frame(frames.GOAWAY, 0, 1, bytes(8)), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.GOAWAY, 0, 0, bytes(7)), ErrorCode.FRAME_SIZE_ERROR),
        (frame(frames.PRIORITY, 0, 0, bytes(5)), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.PUSH_PROMISE, END_HEADERS, 1, bytes(4)), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.HEADERS, END_HEADERS, 1, bytes(16_385)), ErrorCode.FRAME_SIZE_ERROR),
    ],
)
def test_frame_with_a_connection_error_ends_the_connection(sent: bytes, code: ErrorCode) -> None:
    client = Client()
    assert goaway_of(client.asked(sent)) is code
    assert client.server.closing
    assert client.counters.goaways == {code.name.lower(): 1}
    assert client.server.next_deadline() is None
    assert client.asked(ping(b"12345678")) == []


def test_connection_error_cancels_open_calls() -> None:
    client = Client()
    client.send(headers(1), headers(3), data(0, b"x"))
    assert [call.cancels for call in client.calls] == [1, 1]
    assert client.server.open_calls == 0


def with_field(name: bytes, value: bytes, *, first: bool = False) -> bytes:
    return headers(1, ((name, value), *REQUEST) if first else (*REQUEST, (name, value)))


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (with_field(b"X-Upper", b"1"), ErrorCode.PROTOCOL_ERROR),
        (with_field(b"bad name", b"1"), ErrorCode.PROTOCOL_ERROR),
        (with_field(b"", b"1"), ErrorCode.PROTOCOL_ERROR),
        (with_field(b"a", b"b\r\nc"), ErrorCode.PROTOCOL_ERROR),
        (with_field(b"a", b" b"), ErrorCode.PROTOCOL_ERROR),
        (with_field(b"connection", b"close"), ErrorCode.PROTOCOL_ERROR),
        (with_field(b"transfer-encoding", b"chunked"), ErrorCode.PROTOCOL_ERROR),
        (with_field(b"te", b"gzip"), ErrorCode.PROTOCOL_ERROR),
        (with_field(b"x", b"1", first=True), ErrorCode.PROTOCOL_ERROR),
        (with_field(b":path", b"/"), ErrorCode.PROTOCOL_ERROR),
        (with_field(b":method", b"POST", first=True), ErrorCode.PROTOCOL_ERROR),
        (with_field(b":unknown", b"1", first=True), ErrorCode.PROTOCOL_ERROR),
        (with_field(b":status", b"200", first=True), ErrorCode.PROTOCOL_ERROR),
        (headers(1, without=b":method"), ErrorCode.PROTOCOL_ERROR),
        (headers(1, without=b":scheme"), ErrorCode.PROTOCOL_ERROR),
        (headers(1, without=b":path"), ErrorCode.PROTOCOL_ERROR),
        (with_field(b"content-length", b"x"), ErrorCode.PROTOCOL_ERROR),
        (with_field(b"content-length", b"5") + data(1, b"123456"), ErrorCode.PROTOCOL_ERROR),
        (with_field(b"content-length", b"5") + data(1, b"1234", end=True), ErrorCode.PROTOCOL_ERROR),
        (headers(1, (*REQUEST, (b"content-length", b"5")), end=True), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.PRIORITY, 0, 1, pack(">IB", 1, 0)), ErrorCode.PROTOCOL_ERROR),
        (headers(1) + frame(frames.PRIORITY, 0, 1, b"1234"), ErrorCode.FRAME_SIZE_ERROR),
        (
            frame(frames.HEADERS, END_HEADERS | PRIORITIZED, 1, pack(">IB", 1, 0) + encode(REQUEST)),
            ErrorCode.PROTOCOL_ERROR,
        ),
        (headers(1) + headers(1), ErrorCode.PROTOCOL_ERROR),
        (headers(1) + headers(1, [(b":path", b"/")], end=True), ErrorCode.PROTOCOL_ERROR),
        (headers(1) + headers(1, [(b"Upper", b"/")], end=True), ErrorCode.PROTOCOL_ERROR),
        (headers(1) + window_update(1, 0), ErrorCode.PROTOCOL_ERROR),
        (headers(1) + window_update(1, 2**31 - 1), ErrorCode.FLOW_CONTROL_ERROR),
    ],
)
def test_frame_with_a_stream_error_resets_its_stream(sent: bytes, code: ErrorCode) -> None:
    client = Client()
    assert resets_of(client.asked(sent)) == [(1, code)]
    assert client.counters.stream_errors == 1
    assert client.server.open_calls == 0
    assert all(call.cancels == 1 for call in client.calls)
    assert_serves(client, 7)


@pytest.mark.parametrize("sent", [data(1, b"x"), headers(1, [(b"a", b"b")], end=True)])
def test_frame_on_a_stream_that_the_client_ended_resets_it(sent: bytes) -> None:
    client = Client(on_half_closed=lambda handler: None)
    assert resets_of(client.asked(headers(1, end=True), sent)) == [(1, ErrorCode.STREAM_CLOSED)]
    assert client.calls[0].cancels == 1
    assert_serves(client, 7)


def assert_serves(client: Client, stream_id: int) -> None:
    """Assert that the connection serves a further call."""
    before = len(client.calls)
    client.send(headers(stream_id), data(stream_id, message(b"ping"), end=True))
    assert client.calls[before].received == [b"ping"]
    assert client.calls[before].half_closes == 1


def test_headers_with_padding_and_priority_open_a_call() -> None:
    client = Client()
    payload = b"\x03" + pack(">IB", 0, 16) + encode(REQUEST) + bytes(3)
    client.send(frame(frames.HEADERS, END_HEADERS | PADDED | PRIORITIZED, 1, payload))
    assert client.calls[0].call.path == METHOD.decode()
    assert client.calls[0].call.peer == "192.0.2.1"


def test_header_block_in_continuations_opens_a_call() -> None:
    client = Client()
    block = encode(REQUEST)
    client.send(
        frame(frames.HEADERS, END_STREAM, 1, block[:3]),
        frame(frames.CONTINUATION, 0, 1, block[3:20]),
        frame(frames.CONTINUATION, END_HEADERS, 1, block[20:]),
    )
    assert client.calls[0].half_closes == 1


def test_stream_above_the_limit_is_refused_and_its_headers_are_decoded() -> None:
    client = Client(Http2Limits(streams=1))
    refused = frame(frames.HEADERS, END_HEADERS, 3, with_path(STORE_A))
    assert resets_of(client.asked(headers(1), refused)) == [(3, ErrorCode.REFUSED_STREAM)]
    assert client.counters.refused_streams == 1
    client.send(rst_stream(1, 8), frame(frames.HEADERS, END_HEADERS, 5, with_path(NEWEST)))
    assert client.calls[-1].call.path == "/a"


def test_equal_header_blocks_after_a_table_change_are_decoded_anew() -> None:
    client = Client()
    for stream_id, representation in ((1, STORE_A), (3, NEWEST), (5, NEWEST), (7, STORE_B), (9, NEWEST)):
        client.send(frame(frames.HEADERS, END_HEADERS, stream_id, with_path(representation)))
    assert [call.call.path for call in client.calls] == ["/a", "/a", "/a", "/b", "/b"]


def test_many_different_header_blocks_are_served() -> None:
    client = Client()
    for number in range(200):
        client.send(headers(2 * number + 1, (*REQUEST, (b"x-request-id", b"%d" % number)), end=True))
    assert [call.half_closes for call in client.calls] == [1] * 200
    assert len(client.server._blocks.openings) <= OPENINGS_MAX


def test_trailers_of_the_client_half_close_the_call() -> None:
    client = Client()
    client.send(headers(1), headers(1, [(b"a", b"b")], end=True))
    assert client.calls[0].half_closes == 1


def test_padding_of_data_is_removed_and_counted_on_the_windows() -> None:
    client = Client(Http2Limits(stream_window_bytes=65_536, connection_window_bytes=131_072))
    padded = frame(frames.DATA, PADDED, 1, b"\xff" + message(b"m") + bytes(255))
    output = client.asked(headers(1), padded * 130)
    assert client.calls[0].received == [b"m"] * 130
    # 130 frames of 262 bytes are more than half of the stream's window, but less than half of the connection's.
    assert [each.stream_id for each in output if each.kind == frames.WINDOW_UPDATE] == [1]


def test_ping_is_answered_with_its_bytes_ahead_of_queued_data() -> None:
    client = Client(on_message=echo)
    output = client.asked(headers(1), data(1, message(bytes(1000))), ping(b"12345678"))
    assert output[0] == Frame(frames.PING, ACK, 0, b"12345678")
    assert [each.kind for each in output[1:]] == [frames.HEADERS, frames.DATA]


def test_ping_ack_is_not_answered() -> None:
    assert Client().asked(frame(frames.PING, ACK, 0, b"12345678")) == []


def test_rst_stream_cancels_the_call() -> None:
    client = Client()
    assert client.asked(headers(1), rst_stream(1, 8)) == []
    assert client.calls[0].cancels == 1
    client.calls[0].call.send(b"late")
    client.calls[0].call.finish()
    assert client.taken() == []
    assert client.outputs_signalled == 0


def test_goaway_of_the_client_closes_after_the_last_call() -> None:
    client = Client(on_message=echo)
    client.send(headers(1), frame(frames.GOAWAY, 0, 0, bytes(8)))
    assert not client.server.closing
    assert client.calls[0].cancels == 0
    client.send(data(1, message(b"x"), end=True))
    assert client.calls[0].half_closes == 1
    assert client.server.closing


@pytest.mark.parametrize("sent", [frame(frames.PRIORITY, 0, 9, bytes(5)), frame(99, 0xFF, 5, b"anything")])
def test_priority_and_unknown_frames_are_ignored(sent: bytes) -> None:
    client = Client()
    assert client.asked(sent) == []
    assert_serves(client, 1)


def test_settings_ack_precedes_the_data_that_the_settings_release() -> None:
    client = Client(on_message=echo, greet=False)
    client.send(frames.PREFACE, settings((4, 0)), headers(1), data(1, message(b"x" * 100)))
    assert [each.kind for each in client.taken()] == [4, 8, 4, frames.HEADERS]
    output = client.asked(settings((4, 50)))
    assert [each.kind for each in output] == [frames.SETTINGS, frames.DATA]
    assert len(output[1].payload) == 50


def test_reserved_bit_of_the_stream_id_is_ignored() -> None:
    client = Client()
    client.send(headers(1 | 1 << 31), data(1 | 1 << 31, message(b"x")))
    assert client.calls[0].received == [b"x"]
