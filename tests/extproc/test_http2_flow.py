"""Tests of the send windows against a model, of their fairness, and of reads split anywhere."""

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import settings as profile
from hypothesis import strategies as st

from dualmap_extproc.transport.http2 import frames
from dualmap_extproc.transport.http2.frames import ErrorCode, ping, rst_stream, window_update
from dualmap_extproc.transport.http2.limits import Http2Limits
from extproc.http2_client import (
    Client,
    Recorder,
    data,
    frame,
    goaway_of,
    headers,
    message,
    resets_of,
    settings,
)

STREAMS = (1, 3, 5)


class Model:
    """What a client knows of the windows that it granted, and the bytes of each stream."""

    def __init__(self) -> None:
        self.initial = 65_535
        self.connection = 65_535
        self.credit = dict.fromkeys(STREAMS, 0)
        self.expected = dict.fromkeys(STREAMS, b"")
        self.received = dict.fromkeys(STREAMS, b"")

    def window(self, stream_id: int) -> int:
        return min(self.connection, self.initial + self.credit[stream_id])

    def receive(self, stream_id: int, payload: bytes) -> None:
        assert len(payload) <= min(self.window(stream_id), frames.FRAME_BYTES)
        self.connection -= len(payload)
        self.credit[stream_id] -= len(payload)
        self.received[stream_id] += payload

    def check(self) -> None:
        """Everything that the windows allow has arrived, in order."""
        for stream_id in STREAMS:
            assert self.expected[stream_id].startswith(self.received[stream_id])
            if self.window(stream_id) > 0:
                assert self.received[stream_id] == self.expected[stream_id]


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.sampled_from(STREAMS), st.sampled_from([0, 1, 100, 16_379, 16_380, 50_000])),
        st.tuples(st.just("update"), st.sampled_from((0, *STREAMS)), st.integers(1, 70_000)),
        st.tuples(st.just("initial"), st.just(0), st.sampled_from([0, 1, 1000, 65_535, 200_000])),
        st.tuples(st.just("finish"), st.sampled_from(STREAMS), st.just(0)),
        st.tuples(st.just("take"), st.just(0), st.just(0)),
    ),
    max_size=40,
)


@given(STEPS, st.sampled_from([1000, 20_000, 1 << 20]))
@profile(max_examples=150, deadline=None)
def test_windows_agree_with_a_model(steps: list[tuple[str, int, int]], output_bytes: int) -> None:
    client = Client(Http2Limits(output_bytes=output_bytes))
    client.send(*(headers(each) for each in STREAMS))
    calls = dict(zip(STREAMS, (handler.call for handler in client.calls), strict=True))
    model = Model()
    number = 0
    for kind, target, size in (*steps, ("take", 0, 0)):
        if kind == "send" and not calls[target].ended:
            number += 1
            content = bytes((number % 256,)) * size
            calls[target].send(content)
            model.expected[target] += message(content)
        elif kind == "finish":
            calls[target].finish()
        elif kind == "update":
            # The last frame of a finished call may make the update late.
            client.send(window_update(target, size))
            if target:
                model.credit[target] += size
            else:
                model.connection += size
        elif kind == "initial":
            # The server's ACK comes before what the new window releases.
            for each in client.taken():
                if each.kind == frames.DATA:
                    model.receive(each.stream_id, each.payload)
            client.send(settings((4, size)))
            model.initial = size
        elif kind == "take":
            for each in client.taken():
                if each.kind == frames.DATA:
                    model.receive(each.stream_id, each.payload)
            model.check()
    for stream_id, call in calls.items():
        assert call.unsent_bytes == len(model.expected[stream_id]) - len(model.received[stream_id])
    assert not client.server.closing


def sending(sizes: list[int]) -> Client:
    """Return a client with a call for each size, each of which sends a message of this size after its first message."""

    def answer(handler: Recorder, content: bytes) -> None:
        handler.call.send(bytes(sizes[client.calls.index(handler)]))

    client = Client(on_message=answer)
    return client


def test_blocked_streams_are_served_in_turn() -> None:
    client = sending([40_000] * 3)
    client.send(window_update(0, 2**31 - 1 - 65_535), *(headers(each) + data(each, message(b"")) for each in STREAMS))
    order = [each.stream_id for each in client.taken() if each.kind == frames.DATA]
    assert order == [1, 3, 5] * 3


def test_stream_without_a_window_does_not_block_others() -> None:
    client = sending([100_000, 10])
    client.send(window_update(0, 1 << 20), headers(1), data(1, message(b"")), headers(3), data(3, message(b"")))
    sent = [each for each in client.taken() if each.kind == frames.DATA]
    assert sum(len(each.payload) for each in sent if each.stream_id == 1) == 65_535
    assert [each.payload for each in sent if each.stream_id == 3] == [message(bytes(10))]


def test_trailers_wait_for_the_messages_before_them() -> None:
    client = sending([100_000])
    client.send(headers(1), data(1, message(b""), end=True))
    assert sum(len(each.payload) for each in client.taken() if each.kind == frames.DATA) == 65_535
    assert client.calls[0].call.ended
    assert client.server.open_calls == 1
    output = client.asked(window_update(0, 1 << 20), window_update(1, 1 << 20))
    assert [each.kind for each in output] == [frames.DATA] * 3 + [frames.HEADERS]
    assert client.server.open_calls == 0
    assert client.calls[0].drains == 0


def test_handler_is_told_when_its_messages_are_in_the_output() -> None:
    client = sending([100_000])
    client.asked(headers(1), data(1, message(b"")))
    assert client.calls[0].call.unsent_bytes == 100_005 - 65_535
    assert client.calls[0].drains == 0
    client.asked(window_update(0, 1 << 20), window_update(1, 1 << 20))
    assert (client.calls[0].call.unsent_bytes, client.calls[0].drains) == (0, 1)


def test_reset_drops_messages_that_wait() -> None:
    client = sending([100_000])
    client.asked(headers(1), data(1, message(b"")))
    assert client.asked(rst_stream(1, 8), window_update(0, 1 << 20)) == []
    assert client.calls[0].call.unsent_bytes == 0
    assert client.calls[0].cancels == 1


def test_one_piece_of_output_is_bounded_and_ping_goes_ahead_of_the_rest() -> None:
    client = sending([1_000_000])
    client.send(window_update(0, 1 << 24), settings((4, 1 << 24)), headers(1), data(1, message(b"")))
    limit = Http2Limits().output_bytes
    first = client.server.take_output()
    assert limit < len(first) < limit + 2000
    client.send(ping(b"12345678"))
    assert client.taken()[0].kind == frames.PING


def test_data_above_the_streams_window_resets_the_stream() -> None:
    client = Client(Http2Limits(stream_window_bytes=10_000))
    output = client.asked(headers(1), data(1, bytes(16_384)))
    assert resets_of(output) == [(1, ErrorCode.FLOW_CONTROL_ERROR)]


def test_data_above_the_connections_window_ends_the_connection() -> None:
    client = Client(Http2Limits(connection_window_bytes=70_000))
    client.send(headers(1))
    assert goaway_of(client.asked(data(1, bytes(16_000)) * 5)) is ErrorCode.FLOW_CONTROL_ERROR


def test_receive_windows_are_returned_at_their_half() -> None:
    client = Client(Http2Limits(stream_window_bytes=100_000, connection_window_bytes=200_000))
    whole = message(bytes(1_000_000))
    granted = {0: 200_000, 1: 100_000}
    client.send(headers(1))
    for at in range(0, len(whole), 16_384):
        piece = whole[at : at + 16_384]
        for each in granted:
            granted[each] -= len(piece)
            assert granted[each] >= 0
        for update in client.asked(data(1, piece)):
            assert update.kind == frames.WINDOW_UPDATE
            granted[update.stream_id] += update.number
            assert granted[update.stream_id] <= {0: 200_000, 1: 100_000}[update.stream_id]
    assert len(client.calls[0].received[0]) == 1_000_000


def conversation(body_bytes: int) -> bytes:
    """Return the bytes of three calls, with frames of every kind that Envoy sends."""
    calls: list[bytes] = []
    for stream_id in STREAMS:
        calls.append(headers(stream_id))
        calls.append(data(stream_id, message(b"headers")))
        body = message(bytes(each % 256 for each in range(body_bytes)))
        calls += [data(stream_id, body[at : at + 16_384]) for at in range(0, len(body), 16_384)]
        calls.append(data(stream_id, message(b"") + message(b"end")))
        calls.append(ping(b"abcdefgh") + window_update(0, 70_000))
    calls.append(data(1, message(b"chunk")) + rst_stream(1, 2))
    calls.append(data(3, b"", end=True) + frame(frames.HEADERS, 0x5, 5, b"\x00\x01a\x01b"))
    return frames.PREFACE + settings((4, 1 << 20)) + b"".join(calls)


def replayed(pieces: Iterator[bytes]) -> tuple[list[tuple[list[bytes], int, int]], int, int, int]:
    def answer(handler: Recorder, content: bytes) -> None:
        handler.call.send(b"answer to %d" % len(content))
        if content == b"chunk":
            handler.call.finish()

    client = Client(on_message=answer, greet=False)
    output = b""
    for piece in pieces:
        client.send(piece)
        output += client.server.take_output()
    seen = [(call.received, call.half_closes, call.cancels) for call in client.calls]
    # The order of frames may differ only by PING answers, which go ahead of a read's other frames.
    return seen, len(output), client.counters.late_frames, client.server.open_calls


def test_recorded_calls_are_the_same_for_every_split() -> None:
    whole = conversation(300)
    expected = replayed(iter((whole,)))
    seen, *_ = expected
    assert [len(received) for received, _, _ in seen] == [5, 4, 4]
    for split in range(len(whole)):
        assert replayed(iter((whole[:split], whole[split:]))) == expected, split


@pytest.mark.parametrize("size", [1, 2, 8, 9, 10, 13, 100, 16_393])
def test_recorded_calls_are_the_same_for_reads_of_any_size(size: int) -> None:
    whole = conversation(40_000)
    expected = replayed(iter((whole,)))
    assert replayed(whole[at : at + size] for at in range(0, len(whole), size)) == expected


@given(st.lists(st.integers(0, 125_000), max_size=6))
@profile(max_examples=50, deadline=None)
def test_recorded_calls_are_the_same_for_random_splits(splits: list[int]) -> None:
    whole = conversation(40_000)
    ends = [*sorted(each % len(whole) for each in splits), len(whole)]
    pieces = (whole[begin:end] for begin, end in zip([0, *ends], ends, strict=False))
    assert replayed(pieces) == replayed(iter((whole,)))
