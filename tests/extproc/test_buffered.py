"""The bound on the bytes of all bodies that streams store: which request is refused, and when bytes are released."""

from collections.abc import Callable

import pytest

from dualmap_extproc.errors import overloaded
from dualmap_extproc.request.buffered import BufferedBodies
from dualmap_extproc.request.observations import Rejected
from dualmap_extproc.request.reading import LargeBody
from dualmap_extproc.wire import ext_proc_pb2 as wire
from extproc.envoy_messages import (
    BUFFERED,
    DUPLEX,
    NO_WAIT,
    STREAMED,
    Conversation,
    chat,
    crowded_pool,
    destination,
    headers_set,
    pool,
    refused_with,
    request_body,
    request_headers,
    request_trailers,
    response_headers,
)
from extproc.stream_requests import every_mode

chunked_modes = pytest.mark.parametrize("config", [NO_WAIT, DUPLEX, STREAMED], ids=["no-wait", "duplex", "streamed"])
PART = b'{"model": "m", "prompt": "'.ljust(1000, b"x")


class Streams:
    """Streams of one router that share the bound."""

    def __init__(self, limit_bytes: int, *pools, config=NO_WAIT) -> None:
        self.first = Conversation(*pools or (pool(),))
        self.buffered = BufferedBodies(limit_bytes)
        self.config = config

    def begin(self, *chunks: bytes) -> tuple[Conversation, list[wire.ProcessingResponse]]:
        """Open a stream whose body has arrived up to these chunks; return it and the answers to the last one."""
        talk = Conversation(picker=self.first.picker, buffered=self.buffered)
        answers = talk.send(request_headers(self.config))
        for chunk in chunks:
            answers = talk.send(request_body(chunk, end=False))
        return talk, answers

    def refusals(self) -> list[str]:
        return [rejected.refused.code for rejected in self.first.observer.of(Rejected)]


@chunked_modes
def test_bodies_above_the_bound_are_refused_with_503(config):
    streams = Streams(10_500, config=config)
    answers = [streams.begin(PART)[1] for _ in range(100)]

    refused = [each for each in answers if any(answer.HasField("immediate_response") for answer in each)]

    assert [refused_with(each) for each in refused] == [503] * 90
    assert headers_set(refused[0][0])["retry-after"] == "1"
    assert streams.buffered.held_bytes == 10_000
    assert streams.refusals() == ["overloaded"] * 90


@chunked_modes
def test_small_body_displaces_the_largest_arriving_one(config):
    streams = Streams(10_500, config=config)
    small, _ = streams.begin(PART)
    large, _ = streams.begin(*[PART] * 9)

    third, _ = streams.begin()
    answers = third.send(request_body(chat("x" * 600), end=False), request_body(b""))
    third.stream.written()

    assert any(destination(answer) for answer in answers)
    assert refused_with(large.delivered) == 503
    assert (large.stream.ended, large.stream.deadline_s, small.stream.ended) == (True, None, False)
    assert large.send(request_body(PART)) == []
    assert streams.refusals() == ["overloaded"]
    assert streams.buffered.held_bytes == 1000


def test_body_that_grows_beyond_the_others_is_refused_itself():
    streams = Streams(5500)
    for _ in range(3):
        streams.begin(PART)
    large, _ = streams.begin(PART, PART)

    answers = large.send(request_body(PART, end=False))

    assert refused_with(answers) == 503
    assert streams.buffered.held_bytes == 3000


def test_complete_body_is_not_displaced():
    streams = Streams(10_500, crowded_pool(), config=DUPLEX)
    streams.first.send(request_headers(NO_WAIT), request_body(chat("long " * 10_000)))
    queued, answers = streams.begin(*[b" " * 1000] * 9)
    assert answers == []
    assert queued.send(request_body(chat())) == []

    _, answers = streams.begin(PART, PART)

    assert refused_with(answers) == 503
    assert not queued.stream.ended
    assert streams.buffered.held_bytes == 9000 + len(chat())


@every_mode
@pytest.mark.parametrize("cancelled", [False, True])
@pytest.mark.parametrize(
    "sent",
    [
        [],
        [request_body(PART, end=False)],
        [request_body(PART, end=False), request_body(PART)],
        [request_body(chat(), end=False), request_body(b"")],
        [request_body(chat(), end=False), request_trailers()],
        [request_body(chat())],
        [request_body(chat()), response_headers()],
        [request_body(PART, end=False), response_headers(503, end=True)],
        [request_body(PART, end=False), request_headers()],
        [request_body(PART, end=False), wire.ProcessingRequest()],
        [request_body(PART, end=False), request_body(b"x" * 20_000)],
    ],
)
@pytest.mark.parametrize("fleet", ["idle", "busy"])
def test_stream_that_ends_in_any_order_releases_its_bytes(config, sent, cancelled, fleet):
    first = Conversation(crowded_pool(max_held=3))
    if fleet == "busy":
        first.send(request_headers(NO_WAIT), request_body(chat("long " * 10_000)))
    buffered = BufferedBodies(15_000)
    talk = Conversation(picker=first.picker, buffered=buffered)

    talk.send(request_headers(config), *sent)
    talk.close(cancelled=cancelled)

    assert buffered.held_bytes == 0
    assert not buffered._arriving


def test_body_that_is_routed_is_released_before_its_response():
    talk = Conversation()
    talk.send(request_headers(NO_WAIT), request_body(chat(), end=False))
    held = talk.buffered.held_bytes

    talk.send(request_body(b""))

    assert (held, talk.buffered.held_bytes) == (len(chat()), 0)


def test_body_that_goes_back_to_envoy_is_released_after_writing():
    talk = Conversation()

    talk.send(request_headers(DUPLEX), request_body(chat()))
    held = talk.buffered.held_bytes
    talk.stream.written()

    assert (held, talk.buffered.held_bytes) == (len(chat()), 0)


def test_body_in_tiny_chunks_takes_no_more_memory_than_its_bytes():
    talk = Conversation()
    talk.send(request_headers(NO_WAIT), *(request_body(b"x", end=False) for _ in range(20_000)))

    assert len(talk.stream._body._chunks) == 5


class _FullReader:
    """A reader with too many bodies."""

    def read(self, large: LargeBody, done) -> Callable[[], None] | None:
        return None


def test_body_that_no_process_can_read_is_refused():
    talk = Conversation(reader=_FullReader())

    talk.send(request_headers(BUFFERED))
    answers = talk.send(request_body(chat("x" * 600_000)))

    assert refused_with(answers) == overloaded().status
    assert talk.buffered.held_bytes == 0
