"""Tests of floods and other attacks: each is cut or refused at its limit, and healthy clients never reach a limit."""

from collections.abc import Callable

import pytest

from dualmap_extproc.transport.http2 import frames
from dualmap_extproc.transport.http2.frames import ACK, END_HEADERS, ErrorCode, ping, rst_stream, window_update
from dualmap_extproc.transport.http2.hpack import encode
from dualmap_extproc.transport.http2.limits import Http2Limits
from dualmap_extproc.transport.http2.status import Status
from extproc.http2_client import (
    REQUEST,
    Client,
    Recorder,
    data,
    frame,
    goaway_of,
    headers,
    message,
    nothing,
    resets_of,
    settings,
    status_of,
)

LIMITS = Http2Limits()
FLOOD = 20_000


def finish_at_once(handler: Recorder, content: bytes) -> None:
    handler.call.finish()


def assert_cut(client: Client, attack: bytes, reason: str) -> None:
    """Assert that the attack ends its connection, and that another connection is served meanwhile."""
    other = Client(counters=client.counters)
    other.send(headers(1))
    assert goaway_of(client.asked(attack)) is ErrorCode.ENHANCE_YOUR_CALM
    assert client.server.closing
    assert client.counters.goaways == {reason: 1}
    assert client.server.open_calls == 0
    assert client.server.unfinished_bytes == 0
    assert client.asked(attack) == []
    other.send(data(1, message(b"served"), end=True))
    assert other.calls[0].received == [b"served"]
    assert not other.server.closing


def streams(count: int, of: Callable[[int], bytes], first: int = 1) -> bytes:
    """Return bytes of consecutive new streams."""
    return b"".join(of(first + 2 * number) for number in range(count))


@pytest.mark.parametrize(
    ("reason", "provoked"),
    [
        ("resets", lambda stream_id: headers(stream_id) + rst_stream(stream_id, 8)),
        ("control_frames", lambda stream_id: headers(stream_id) + window_update(stream_id, 0)),
        ("resets", lambda stream_id: headers(stream_id) + window_update(stream_id, 2**31 - 1)),
        ("resets", lambda stream_id: headers(stream_id, without=b":path")),
        ("resets", lambda stream_id: headers(stream_id) + headers(stream_id)),
        ("resets", lambda stream_id: headers(stream_id, end=True) + data(stream_id, b"x")),
    ],
)
def test_flood_of_resets_is_cut(reason: str, provoked: Callable[[int], bytes]) -> None:
    client = Client(on_half_closed=nothing)
    assert_cut(client, streams(FLOOD, provoked), reason)
    assert len(client.calls) <= LIMITS.reset_burst + 1


def test_flood_of_priority_errors_is_cut() -> None:
    client = Client()
    client.send(streams(FLOOD // 4, lambda stream_id: headers(stream_id)))
    own = frame(frames.PRIORITY, 0, 1, b"\0\0\0\1\0")
    assert_cut(client, own * FLOOD, "control_frames")


@pytest.mark.parametrize(
    "flood",
    [
        ping(b"12345678"),
        frame(frames.PING, ACK, 0, b"12345678"),
        settings(),
        settings((4, 0), (4, 65_535)),
        frame(frames.SETTINGS, ACK),
        frame(frames.PRIORITY, 0, 1, bytes(5)),
        data(1),
        frame(frames.DATA, frames.PADDED, 1, bytes(256).replace(b"\0", b"\xff", 1)),
        window_update(0, 1),
        window_update(1, 1_023),
        frame(77, 0, 0, b"unknown"),
        frame(frames.GOAWAY, 0, 0, bytes(8)),
    ],
)
def test_flood_of_frames_without_content_is_cut(flood: bytes) -> None:
    client = Client()
    client.send(headers(1))
    assert_cut(client, flood * FLOOD, "control_frames")


@pytest.mark.parametrize("late", [data(1, b"x"), window_update(1, 5000), rst_stream(1, 8), headers(1)])
def test_flood_of_late_frames_is_cut(late: bytes) -> None:
    client = Client(on_message=finish_at_once)
    client.send(headers(1), data(1, message(b"x")))
    assert_cut(client, late * FLOOD, "control_frames")
    assert client.counters.late_frames <= LIMITS.control_burst + LIMITS.control_per_call + 2


def test_control_frames_are_allowed_again_with_time() -> None:
    client = Client()
    client.send(ping(b"12345678") * 1900)
    client.now = 2.0
    client.send(ping(b"12345678") * 1000)
    assert not client.server.closing


@pytest.mark.parametrize("piece", [b"\x00\x01a\x01b", b""])
def test_flood_of_continuations_is_cut(piece: bytes) -> None:
    client = Client()
    attack = frame(frames.HEADERS, 0, 1, encode(REQUEST)) + frame(frames.CONTINUATION, 0, 1, piece) * FLOOD
    assert_cut(client, attack, "header_bytes")


def test_header_block_above_the_limit_is_cut() -> None:
    client = Client()
    attack = frame(frames.HEADERS, 0, 1, bytes(16_000)) + frame(frames.CONTINUATION, END_HEADERS, 1, bytes(385))
    assert_cut(client, attack, "header_bytes")


def test_header_list_above_the_limit_is_a_compression_error() -> None:
    client = Client()
    bomb = encode(REQUEST) + b"\x40\x01a\x7f\xe9\x1e" + b"b" * 4000 + b"\xbe" * 10_000
    assert goaway_of(client.asked(frame(frames.HEADERS, END_HEADERS, 1, bomb))) is ErrorCode.COMPRESSION_ERROR


def test_settings_with_too_many_entries_are_cut() -> None:
    client = Client()
    assert client.asked(settings(*[(77, 1)] * 40))
    assert_cut(client, settings(*[(77, 1)] * 41), "settings")


def test_streams_above_the_limit_are_refused_and_then_cut() -> None:
    client = Client(Http2Limits(streams=1000))
    client.send(streams(1000, headers))
    output = client.asked(streams(500, headers, first=2001))
    assert {code for _, code in resets_of(output)} == {ErrorCode.REFUSED_STREAM}
    assert client.counters.refused_streams == 500
    assert client.server.open_calls == 1000
    assert_cut(client, streams(FLOOD, headers, first=3001), "resets")


def test_more_than_a_hundred_thousand_calls_may_be_open() -> None:
    client = Client()
    for first in range(1, 2 * 110_000, 20_000):
        client.send(streams(10_000, headers, first=first))
    assert client.server.open_calls == 110_000
    assert client.asked(data(1, message(b"x"), end=True))[0].kind == frames.HEADERS
    assert not client.server.closing


def test_unfinished_messages_of_many_streams_are_refused() -> None:
    client = Client()
    part = message(bytes(15 << 20))[: 16_384 * 900]
    pieces = [part[at : at + 16_384] for at in range(0, len(part), 16_384)]
    for stream_id in range(1, 13, 2):
        client.send(headers(stream_id))
        for piece in pieces:
            client.send(data(stream_id, piece))
            client.server.take_output()
        assert client.server.unfinished_bytes <= LIMITS.unfinished_bytes
    assert [call.cancels for call in client.calls] == [0, 0, 0, 0, 1, 1]
    assert not client.server.closing


def sending(size: int) -> Callable[[Recorder, bytes], None]:
    return lambda handler, content: handler.call.send(bytes(size))


def test_messages_above_the_unsent_bytes_of_a_stream_reset_it() -> None:
    client = Client(on_message=sending(1 << 20))
    client.asked(settings((4, 0)), headers(1), headers(3))
    output = client.asked(data(1, message(b"")) * 16)
    assert resets_of(output) == []
    output = client.asked(data(1, message(b"")))
    assert resets_of(output) == [(1, ErrorCode.ENHANCE_YOUR_CALM)]
    assert client.calls[0].cancels == 1
    assert client.counters.overflows == 1
    assert client.calls[0].call.unsent_bytes == 0
    client.send(data(3, end=True))
    assert client.calls[1].half_closes == 1


def test_messages_above_the_unsent_bytes_of_a_connection_reset_their_stream() -> None:
    client = Client(Http2Limits(unsent_connection_bytes=10_000), on_message=sending(3_000))
    output = client.asked(settings((4, 0)), *(headers(each) + data(each, message(b"")) for each in (1, 3, 5, 7)))
    assert resets_of(output) == [(7, ErrorCode.ENHANCE_YOUR_CALM)]
    client.send(rst_stream(1, 8))
    assert client.asked(headers(9), data(9, message(b""))) != []
    assert client.calls[-1].cancels == 0


def test_call_whose_message_is_above_the_limit_does_not_end_well() -> None:
    def overflow_and_finish(handler: Recorder, content: bytes) -> None:
        handler.call.send(bytes(101))
        handler.call.send(b"behind the gap")
        handler.call.finish()

    client = Client(Http2Limits(unsent_stream_bytes=100), on_message=overflow_and_finish)
    client.asked(settings((4, 0)))
    output = client.asked(headers(1), data(1, message(b"")))
    assert resets_of(output) == [(1, ErrorCode.ENHANCE_YOUR_CALM)]
    assert {each.kind for each in output if each.stream_id} == {frames.RST_STREAM}
    assert client.calls[0].cancels == 1


def test_overflow_outside_a_read_is_a_deadline_that_is_due() -> None:
    client = Client(Http2Limits(unsent_stream_bytes=100))
    client.asked(settings((4, 0)), headers(1))
    client.calls[0].call.send(bytes(101))
    assert client.outputs_signalled == 1
    assert client.server.next_deadline() == client.now
    client.server.on_deadline(client.now)
    assert client.calls[0].cancels == 1
    assert resets_of(client.taken()) == [(1, ErrorCode.ENHANCE_YOUR_CALM)]


def test_messages_to_a_client_that_does_not_read_stay_in_their_streams() -> None:
    client = Client(on_message=sending(100_000))
    client.send(window_update(0, 1 << 30), settings((4, 1 << 30)), headers(1), data(1, message(b"")) * 100)
    assert client.calls[0].call.unsent_bytes == 100 * 100_005
    assert len(client.server.take_output()) < LIMITS.output_bytes + 2000


def test_message_above_the_limit_of_the_connection_is_refused() -> None:
    client = Client()
    prefix = b"\0" + (LIMITS.message_bytes + 1).to_bytes(4, "big")
    assert status_of(client, client.asked(headers(1), data(1, prefix)))[0] == Status.RESOURCE_EXHAUSTED


def test_envoys_answers_to_calls_that_the_server_ends_are_not_cut() -> None:
    # Envoy answers each end with RST_STREAM, and often with a late message. 6000 calls a second for two seconds.
    client = Client(on_message=finish_at_once)
    for number in range(12_000):
        client.now = number / 6000
        stream_id = 2 * number + 1
        client.send(headers(stream_id), data(stream_id, message(b"x")))
        client.server.take_output()
        client.send(data(stream_id, message(b"late")), rst_stream(stream_id, 2))
    assert not client.server.closing
    assert client.counters.late_frames == 24_000


def test_uploads_that_the_server_ends_are_not_cut() -> None:
    # Envoy has up to a window of the upload in flight when it hears of the end. 50 uploads a second for ten seconds.
    client = Client(on_message=finish_at_once)
    for number in range(500):
        client.now = number / 50
        stream_id = 2 * number + 1
        client.send(headers(stream_id), data(stream_id, message(b"x")))
        client.server.take_output()
        client.send(data(stream_id, bytes(16_000)) * 60, rst_stream(stream_id, 2))
        client.server.take_output()
    assert not client.server.closing


def test_calls_of_unknown_methods_are_not_cut() -> None:
    client = Client()
    unknown = [*REQUEST[:2], (b":path", b"/test.Service/Unknown"), *REQUEST[3:]]
    for number in range(5_000):
        client.now = number / 1000
        stream_id = 2 * number + 1
        client.send(headers(stream_id, unknown), data(stream_id, message(b"x")), rst_stream(stream_id, 2))
        client.server.take_output()
    assert not client.server.closing


def test_calls_that_are_reset_while_the_window_is_closed_leave_nothing() -> None:
    client = Client(on_message=sending(100_000))
    for number in range(300):
        client.now = number / 10
        stream_id = 2 * number + 1
        client.send(headers(stream_id), data(stream_id, message(b"")))
        client.server.take_output()
        client.now += 2.0
        client.send(rst_stream(stream_id, 8))
    assert not client.server.closing
    assert not client.server._output._ready


def test_clients_that_leave_together_are_not_cut() -> None:
    client = Client(on_message=nothing)
    client.send(streams(20_000, headers))
    client.now = 1.5
    client.send(streams(20_000, lambda stream_id: rst_stream(stream_id, 8)))
    assert not client.server.closing
    assert sum(call.cancels for call in client.calls) == 20_000


def test_pings_between_the_messages_of_a_long_call_are_not_cut() -> None:
    # grpc-go measures the round trip with a PING in each round in which it sends.
    client = Client()
    client.send(headers(1))
    for _ in range(10_000):
        client.send(data(1, message(b"x")), ping(b"12345678"))
        client.server.take_output()
    assert not client.server.closing
