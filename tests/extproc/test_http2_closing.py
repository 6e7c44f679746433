"""Tests of the ends of streams and connections: late frames, remembered streams, drain, silence."""

import pytest

from dualmap_extproc.transport.http2 import frames
from dualmap_extproc.transport.http2.frames import ACK, END_HEADERS, ErrorCode, ping, rst_stream, window_update
from dualmap_extproc.transport.http2.hpack import encode
from dualmap_extproc.transport.http2.limits import Http2Limits
from extproc.http2_client import (
    NEWEST,
    REQUEST,
    STORE_A,
    Client,
    Recorder,
    data,
    finish,
    frame,
    goaway_of,
    headers,
    message,
    nothing,
    resets_of,
    settings,
    status_of,
    with_path,
)


def finish_at_once(handler: Recorder, content: bytes) -> None:
    handler.call.finish()


def test_call_that_the_server_ends_first_is_reset_without_error() -> None:
    client = Client(on_message=finish_at_once)
    output = client.asked(headers(1), data(1, message(b"x")))
    assert status_of(client, output) == (0, "")
    assert [each.kind for each in output] == [frames.HEADERS, frames.RST_STREAM]
    assert resets_of(output) == [(1, ErrorCode.NO_ERROR)]
    assert client.calls[0].cancels == 0


def test_call_that_the_client_ended_is_not_reset() -> None:
    client = Client()
    output = client.asked(headers(1), data(1, message(b"x"), end=True))
    assert [each.kind for each in output] == [frames.HEADERS]


def test_call_finished_by_its_last_message_is_not_reset() -> None:
    client = Client(on_message=finish_at_once)
    output = client.asked(headers(1), data(1, message(b"x"), end=True))
    assert [each.kind for each in output] == [frames.HEADERS]
    assert client.calls[0].half_closes == 0


def test_late_frames_of_a_call_that_the_server_ended_are_dropped_and_counted() -> None:
    client = Client(on_message=finish_at_once)
    client.asked(headers(1), data(1, message(b"x")))
    late = (data(1, message(b"y")), headers(1, [(b"a", b"b")], end=True), window_update(1, 5000), rst_stream(1, 2))
    assert client.asked(*late) == []
    assert client.counters.late_frames == 4
    assert client.calls[0].received == [b"x"]
    assert not client.server.closing


def test_late_headers_change_the_table() -> None:
    client = Client(on_message=finish_at_once)
    client.asked(headers(1), data(1, message(b"x")))
    client.send(frame(frames.HEADERS, END_HEADERS | 1, 1, STORE_A))
    client.send(frame(frames.HEADERS, END_HEADERS, 3, with_path(NEWEST)))
    assert client.calls[1].call.path == "/a"


@pytest.mark.parametrize("late", [data(1, b"x"), headers(1)])
def test_frame_on_a_stream_that_both_sides_ended_is_a_connection_error(late: bytes) -> None:
    client = Client()
    client.asked(headers(1, end=True))
    assert goaway_of(client.asked(late)) is ErrorCode.STREAM_CLOSED


@pytest.mark.parametrize("late", [data(1, b"x"), headers(1)])
def test_frame_after_the_clients_reset_is_a_connection_error(late: bytes) -> None:
    client = Client()
    client.asked(headers(1), rst_stream(1, 8))
    assert goaway_of(client.asked(late)) is ErrorCode.STREAM_CLOSED


@pytest.mark.parametrize("late", [window_update(1, 5000), rst_stream(1, 8), frame(frames.PRIORITY, 0, 1, bytes(5))])
def test_harmless_frame_on_a_closed_stream_is_ignored(late: bytes) -> None:
    client = Client()
    client.asked(headers(1, end=True))
    assert client.asked(late) == []
    assert not client.server.closing


@pytest.mark.parametrize("late", [data(1, b"x"), headers(1)])
def test_frame_on_a_forgotten_stream_resets_only_this_stream(late: bytes) -> None:
    client = Client(Http2Limits(ended_ids=4))
    for number in range(8):
        client.asked(headers(2 * number + 1, end=True))
    assert resets_of(client.asked(late)) == [(1, ErrorCode.STREAM_CLOSED)]
    assert not client.server.closing
    assert client.counters.late_frames == 1


def test_stalled_client_with_many_ended_calls_keeps_its_connection() -> None:
    client = Client(on_message=finish_at_once)
    ids = range(1, 2 * 20_000, 2)
    for stream_id in ids:
        client.send(headers(stream_id), data(stream_id, message(b"x")))
        client.server.take_output()
    output = client.asked(*(data(stream_id, message(b"late")) + rst_stream(stream_id, 2) for stream_id in ids[:900]))
    assert {code for _, code in resets_of(output)} == {ErrorCode.STREAM_CLOSED}
    assert not client.server.closing


def test_data_of_a_stream_that_was_skipped_resets_it() -> None:
    client = Client()
    client.asked(headers(5))
    assert resets_of(client.asked(data(3, b"x"))) == [(3, ErrorCode.STREAM_CLOSED)]


def test_drain_announces_accepts_calls_on_the_way_and_closes_after_the_last() -> None:
    client = Client()
    client.send(headers(1))
    client.server.drain(client.now)
    first, probe = client.taken()
    assert first.payload == (2**31 - 1).to_bytes(4, "big") + bytes(4) + b"drain"
    assert probe.kind == frames.PING
    client.send(headers(3))
    (last,) = client.asked(frame(frames.PING, ACK, 0, probe.payload))
    assert last.payload[:8] == (3).to_bytes(4, "big") + bytes(4)
    assert not client.server.closing
    client.send(data(1, message(b"x"), end=True))
    assert not client.server.closing
    client.send(data(3, message(b"y"), end=True))
    assert [call.received for call in client.calls] == [[b"x"], [b"y"]]
    assert client.server.closing
    assert client.counters.goaways == {"drain": 1}


def test_drain_without_an_answer_to_ping_continues_after_its_limit() -> None:
    client = Client()
    client.send(headers(1))
    client.server.drain(5.0)
    client.taken()
    assert client.server.next_deadline() == 6.0
    client.server.on_deadline(5.9)
    assert client.taken() == []
    client.server.on_deadline(6.0)
    (last,) = client.taken()
    assert last.payload[:4] == (1).to_bytes(4, "big")


def test_drain_of_an_idle_connection_closes_it() -> None:
    client = Client()
    client.server.drain(0.0)
    _, probe = client.taken()
    client.send(frame(frames.PING, ACK, 0, probe.payload))
    assert client.server.closing


def test_streams_after_the_final_goaway_are_ignored_and_open_calls_continue() -> None:
    client = Client(Http2Limits(connection_window_bytes=131_072))
    client.send(headers(1))
    client.server.drain(0.0)
    client.server.on_deadline(1.0)
    client.taken()
    late = (headers(3), data(3, bytes(16_384)), window_update(3, 5000), headers(3, [(b"a", b"b")], end=True))
    refused = (headers(5), rst_stream(5, 8), data(7, bytes(16_384)) * 4)
    output = client.asked(*late, *refused)
    # The bytes of ignored streams return to the connection's window.
    assert [(each.kind, each.stream_id, each.number) for each in output] == [(frames.WINDOW_UPDATE, 0, 5 * 16_384)]
    assert len(client.calls) == 1
    client.send(data(1, message(b"x"), end=True))
    assert client.calls[0].received == [b"x"]
    assert client.server.closing


def test_headers_of_ignored_streams_change_the_table() -> None:
    client = Client()
    client.send(headers(1))
    client.server.drain(0.0)
    client.server.on_deadline(1.0)
    client.send(frame(frames.HEADERS, END_HEADERS, 3, encode(REQUEST) + b"\x40\x01a\x01b"))
    # The trailers of the open call use the entry.
    client.send(frame(frames.HEADERS, END_HEADERS | 1, 1, b"\xbe"))
    assert client.calls[0].half_closes == 1


def test_connection_without_preface_and_settings_ends_after_ten_seconds() -> None:
    client = Client(greet=False)
    client.send(frames.PREFACE)
    assert client.server.next_deadline() == 10.0
    client.server.on_deadline(9.9)
    assert not client.server.closing
    client.server.on_deadline(10.0)
    assert goaway_of(client.taken()) is ErrorCode.SETTINGS_TIMEOUT
    assert client.counters.goaways == {"handshake": 1}


def test_silent_connection_gets_a_ping_and_ends_without_an_answer() -> None:
    client = Client()
    client.send(headers(1))
    assert client.server.next_deadline() == 30.0
    client.server.on_deadline(30.0)
    (probe,) = client.taken()
    assert (probe.kind, probe.flags) == (frames.PING, 0)
    assert client.server.next_deadline() == 60.0
    client.server.on_deadline(45.0)
    assert client.taken() == []
    client.server.on_deadline(60.0)
    assert goaway_of(client.taken()) is ErrorCode.NO_ERROR
    assert client.calls[0].cancels == 1
    assert client.counters.goaways == {"silence": 1}


def test_answer_to_the_ping_keeps_a_silent_connection() -> None:
    client = Client()
    client.server.on_deadline(30.0)
    (probe,) = client.taken()
    client.now = 31.0
    client.send(frame(frames.PING, ACK, 0, probe.payload))
    assert client.server.next_deadline() == 61.0
    client.server.on_deadline(60.0)
    assert not client.server.closing


def test_lost_connection_cancels_its_calls() -> None:
    client = Client()
    client.send(headers(1), headers(3), data(3, message(b"12345")[:7]))
    client.server.lost(1.0)
    assert [call.cancels for call in client.calls] == [1, 1]
    assert client.server.closing
    assert client.server.unfinished_bytes == 0
    for call in client.calls:
        call.call.send(b"x")
        call.call.finish()
    assert client.server.open_calls == 0


def test_finished_calls_leave_nothing_behind() -> None:
    client = Client(on_message=nothing, on_half_closed=finish)
    for stream_id in range(1, 2001, 2):
        client.send(headers(stream_id), data(stream_id, message(b"x"), end=True))
        client.server.take_output()
    assert client.server.open_calls == 0
    assert client.server.unfinished_bytes == 0
    assert not client.asked(settings((4, 100_000)))[1:]
    assert ping(b"12345678")
