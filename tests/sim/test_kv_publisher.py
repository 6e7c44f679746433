"""Tests of the publisher of KV events over real sockets, read as a router reads them."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from itertools import count

import msgspec
import pytest
import zmq
import zmq.asyncio

from dualmap.engines.events import Batch, Removed, Stored, read_batch
from dualmap.engines.profile import EventSource, read_event_sources
from dualmap.engines.source import Message, ReplayEnd, read_frames
from dualmap_sim.block_pool import EventBatch
from dualmap_sim.errors import CannotPublish
from dualmap_sim.kv_publisher import KvPublisher
from dualmap_sim.server_settings import KvEventSettings

FREE = KvEventSettings(port=0, replay_port=0)
WAIT_S = 30.0
EVENTS = (Removed(hashes=(5, 6), group=0), Stored(hashes=(7,), parent=5, tokens=bytes(64), block_tokens=16, group=0))

Start = Callable[..., KvPublisher]
Connect = Callable[[int, str], "zmq.asyncio.Socket"]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Start publishers, and close them after the test."""
    async with AsyncExitStack() as stack:

        def started(settings: KvEventSettings = FREE) -> KvPublisher:
            publisher = KvPublisher(settings, host="127.0.0.1")
            stack.push_async_callback(publisher.close)
            publisher.start()
            return publisher

        yield started


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    """Connect sockets of a router, and close them after the test."""
    context = zmq.asyncio.Context()
    # The context does not keep its sockets alive.
    sockets: list[zmq.asyncio.Socket] = []

    def connected(kind: int, endpoint: str) -> zmq.asyncio.Socket:
        socket = context.socket(kind)
        sockets.append(socket)
        if kind == zmq.SUB:
            socket.subscribe(b"")
        socket.connect(endpoint)
        return socket

    yield connected
    context.destroy(linger=0)


async def receive(socket: zmq.asyncio.Socket) -> list[bytes]:
    return await asyncio.wait_for(socket.recv_multipart(), WAIT_S)


async def first_frames(publisher: KvPublisher, socket: zmq.asyncio.Socket) -> list[bytes]:
    """Publish until the subscriber receives a message, because a subscription takes a moment."""
    async with asyncio.timeout(WAIT_S):
        for number in count():
            publisher.publish(EventBatch(number, 0.0, EVENTS))
            if await socket.poll(20):
                break
        return await socket.recv_multipart()


async def replay(socket: zmq.asyncio.Socket, start: int) -> list[int]:
    """Return the numbers of a replay until its end mark."""
    await socket.send_multipart((b"", start.to_bytes(8, "big")))
    numbers = []
    while not isinstance(answer := read_frames(await receive(socket)), ReplayEnd):
        assert isinstance(answer, Message)
        numbers.append(answer.number)
    return numbers


@pytest.mark.parametrize("as_arrays", [False, True])
async def test_live_message_has_three_frames(start: Start, connect: Connect, as_arrays: bool) -> None:
    publisher = start(KvEventSettings(port=0, replay_port=0, as_arrays=as_arrays))
    frames = await first_frames(publisher, connect(zmq.SUB, publisher.endpoint))

    assert len(frames) == 3
    assert frames[0] == b""
    message = read_frames(frames)
    assert isinstance(message, Message)
    unpacked = msgspec.msgpack.decode(message.payload)
    assert unpacked[2] == 0
    # One event for each removed block, before the store.
    assert len(unpacked[1]) == 3
    assert isinstance(unpacked[1][0], list if as_arrays else dict)
    batch = read_batch(unpacked)
    assert isinstance(batch, Batch)
    assert batch.events == EVENTS


async def test_map_events_have_the_fields_of_vllm(start: Start, connect: Connect) -> None:
    publisher = start()
    frames = await first_frames(publisher, connect(zmq.SUB, publisher.endpoint))
    removed, _, stored = msgspec.msgpack.decode(frames[2])[1]

    assert removed == {"type": "BlockRemoved", "block_hashes": [5], "medium": "GPU", "group_idx": 0}
    assert stored == {
        "type": "BlockStored",
        "block_hashes": [7],
        "parent_block_hash": 5,
        "token_ids": [0] * 16,
        "block_size": 16,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None],
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }


@pytest.mark.parametrize(("as_arrays", "count"), [(False, 4), (True, 3)])
async def test_replay_answers_equal_the_live_messages(
    start: Start, connect: Connect, as_arrays: bool, count: int
) -> None:
    publisher = start(KvEventSettings(port=0, replay_port=0, as_arrays=as_arrays))
    subscriber = connect(zmq.SUB, publisher.endpoint)
    live = await first_frames(publisher, subscriber)
    number = int.from_bytes(live[1], "big")
    dealer = connect(zmq.DEALER, publisher.replay_endpoint)
    await dealer.send_multipart((b"", live[1]))
    answer = await receive(dealer)

    # The DEALER receives an empty frame first, and the topic since vLLM 0.26.
    assert len(answer) == count
    assert answer[-2:] == live[-2:]
    # The publisher may have sent more messages before the first one arrived.
    replayed = await replay(connect(zmq.DEALER, publisher.replay_endpoint), 0)
    assert replayed[: number + 1] == list(range(number + 1))


async def test_replay_begins_at_the_oldest_kept_message(start: Start, connect: Connect) -> None:
    publisher = start(KvEventSettings(port=0, replay_port=0, buffer_steps=3))
    for number in range(5):
        publisher.publish(EventBatch(number, 0.0, EVENTS))

    dealer = connect(zmq.DEALER, publisher.replay_endpoint)
    assert await replay(dealer, 0) == [2, 3, 4]
    assert await replay(dealer, 4) == [4]
    assert await replay(dealer, 5) == []


async def test_replay_drops_messages_above_the_send_limit(start: Start, connect: Connect) -> None:
    publisher = start(KvEventSettings(port=0, replay_port=0, send_limit=2))
    # Large messages, so that the connection's own buffers are full.
    large = Stored(hashes=(7,), parent=5, tokens=b"\xff\xff\xff\x7f" * 16384, block_tokens=16384, group=0)
    for number in range(400):
        publisher.publish(EventBatch(number, 0.0, (large,)))
    dealer = connect(zmq.DEALER, publisher.replay_endpoint)
    dealer.set_hwm(2)
    await dealer.send_multipart((b"", bytes(8)))
    await asyncio.sleep(1.0)

    numbers = []
    while await dealer.poll(500):
        answer = read_frames(await dealer.recv_multipart())
        if isinstance(answer, Message):
            numbers.append(answer.number)
    assert numbers == sorted(numbers)
    assert 0 < len(numbers) < 400


async def test_requests_of_another_form_are_ignored(start: Start, connect: Connect) -> None:
    publisher = start()
    publisher.publish(EventBatch(0, 0.0, EVENTS))
    dealer = connect(zmq.DEALER, publisher.replay_endpoint)
    await dealer.send_multipart((b"", b"x"))
    await dealer.send_multipart((bytes(8),))

    assert await replay(dealer, 0) == [0]


async def test_ports_of_a_rank_are_above_the_base(start: Start) -> None:
    free = start()
    (source,) = read_event_sources(free.sources).event_sources
    assert source.port is not None
    assert source.replay_port is not None
    await free.close()
    ranked = start(KvEventSettings(port=source.port - 3, replay_port=source.replay_port - 3, rank=3))

    assert read_event_sources(ranked.sources).event_sources == (
        EventSource(rank=3, port=source.port, replay_port=source.replay_port, topic=""),
    )


async def test_used_port_is_reported(start: Start) -> None:
    (source,) = read_event_sources(start().sources).event_sources
    assert source.port is not None

    with pytest.raises(CannotPublish, match=rf"KV events on tcp://127.0.0.1:{source.port}: "):
        start(KvEventSettings(port=source.port, replay_port=0))
