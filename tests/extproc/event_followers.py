"""A picker that follows the KV events of publishers on loopback, and servers that are no publishers."""

import asyncio
import json
import time
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import pytest
import zmq.asyncio
from prometheus_client import CollectorRegistry

from dualmap.engines.events import Stored
from dualmap.engines.profile import EngineProfile, read_event_sources, read_metrics
from dualmap.pools.pool import Engine, KvEvents, Member, Pool
from dualmap.prompts.api import Api
from dualmap.requests import EventsStatus
from dualmap_extproc.engines import kv_events
from dualmap_extproc.engines.metrics import KvEventMetrics
from dualmap_extproc.request.observations import FanOut
from dualmap_extproc.request.picked import Picked
from dualmap_extproc.request.picker import Picker
from dualmap_extproc.settings import Limits
from dualmap_sim.errors import CannotPublish
from dualmap_sim.kv_publisher import KvPublisher
from dualmap_sim.server_settings import KvEventSettings
from extproc import envoy_messages
from extproc.event_publishers import BLOCK, Publisher
from waiting import WAIT_S
from web_server import stop_accepting

PROMPT = list(range(100, 100 + 20 * BLOCK + 3))
HASHES = tuple(range(1, 21))
STORED = Stored(
    hashes=HASHES, parent=None, tokens=array("I", PROMPT[: 20 * BLOCK]).tobytes(), block_tokens=BLOCK, group=0
)
KEY = b"k" * 32
RANKS_HOST = "127.0.0.9"


class Following:
    """A picker whose pool has one member for each publisher, and the follower of their events."""

    def __init__(self, *publishers: Publisher, engine: Engine | None = None) -> None:
        self.publishers = publishers
        self.registry = CollectorRegistry()
        self.picker = Picker(Limits(), FanOut().report, id_prefix="r", hash_key=KEY)
        self.events = kv_events.KvEvents(self.picker.on_kv_events, KvEventMetrics(self.registry))
        self.pool = replace(
            envoy_messages.pool(),
            engine=engine or Engine(kv_events=KvEvents(enabled=True)),
            members=tuple(
                Member(id=f"m-{number}", address=each.host, port=8000) for number, each in enumerate(publishers)
            ),
        )
        self.adopt(self.pool)
        self._task = asyncio.create_task(self.events.run())
        for number, each in enumerate(publishers):
            self.tell(f"m-{number}", each.profile())

    def adopt(self, *pools: Pool) -> None:
        self.picker.set_pools(self.now, pools)
        self.events.set_pools(pools)

    @property
    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def tell(self, member: str, profile: EngineProfile) -> None:
        self.picker.on_profile(self.now, self.pool.id, member, profile)
        self.events.on_profile(self.pool.id, member, profile)

    def status(self, number: int = 0) -> EventsStatus:
        return self.picker.statuses()[0].endpoints[number].events

    def pick(self, prompt: object = PROMPT, **fields) -> Picked:
        body = json.dumps({"model": "m", "prompt": prompt, **fields}).encode()
        picked = self.picker.pick(
            self.now, body, None, self.now, headers={}, resume=lambda _: None, api=Api.COMPLETIONS
        )
        assert isinstance(picked, Picked)
        return picked

    async def until(self, condition: Callable[[], object], *, within_s: float = WAIT_S) -> None:
        async with asyncio.timeout(within_s):
            while not condition():  # noqa: ASYNC110 - the condition changes without an event
                await asyncio.sleep(0.01)

    async def has(self, *, number: int = 0, **expected) -> None:
        """Wait for a status."""
        try:
            await self.until(
                lambda: all(getattr(self.status(number), name) == value for name, value in expected.items())
            )
        except TimeoutError:
            pytest.fail(f"{expected} is expected, the status is {self.status(number)}")

    def time_turns(self, turns: list[float]) -> None:
        """Add the CPU seconds of each turn to ``turns``: on a busy machine, other processes interrupt a turn."""
        turn = self.events._turn

        def timed(until_s: float) -> None:
            began_s = time.thread_time()
            turn(until_s)
            turns.append(time.thread_time() - began_s)

        self.events._turn = timed

    def sample(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, {"pool": self.pool.id, **labels})

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self.events.close()
        for each in self.publishers:
            await each.close()


@asynccontextmanager
async def following(
    *, members: int = 1, replays: bool = True, before: Callable[[Publisher], None] = lambda _: None
) -> AsyncIterator[Following]:
    context = zmq.asyncio.Context()
    publishers = [Publisher(context, f"127.0.0.{2 + number}", replays=replays) for number in range(members)]
    for each in publishers:
        before(each)
    follows = Following(*publishers)
    try:
        for each in publishers:
            await each.subscribed()
        yield follows
    finally:
        await follows.close()
        context.destroy(linger=0)


async def ranks_of(count: int) -> tuple[KvEvents, list[KvPublisher]]:
    """Return the ports of rank 0, and the simulated engine's publishers of the ranks of one member."""
    first = KvPublisher(KvEventSettings(port=0, replay_port=0), host=RANKS_HOST)
    first.start()
    (source,) = read_event_sources(first.sources).event_sources
    assert source.port is not None
    assert source.replay_port is not None
    ports, ranks = KvEvents(enabled=True, port=source.port, replay_port=source.replay_port), [first]
    try:
        for rank in range(1, count):
            settings = KvEventSettings(port=ports.port, replay_port=ports.replay_port, rank=rank)
            ranks.append(KvPublisher(settings, host=RANKS_HOST))
            ranks[-1].start()
    except CannotPublish:
        # Another socket has the next port.
        for each in ranks:
            await each.close()
        return await ranks_of(count)
    return ports, ranks


def page_of(*ranks: int) -> EngineProfile:
    """Return what a vLLM without ``/kv_event_sources`` says about its ranks."""
    lines = [f'vllm:num_requests_{kind}{{engine="{rank}"}} 0\n' for rank in ranks for kind in ("running", "waiting")]
    return read_metrics("vLLM", "".join(lines).encode())


@asynccontextmanager
async def following_ranks(count: int) -> AsyncIterator[tuple[Following, list[KvPublisher]]]:
    """Follow a member whose ports only the pool says."""
    ports, ranks = await ranks_of(count)
    follows = Following(engine=Engine(kv_events=ports))
    follows.adopt(replace(follows.pool, members=(Member(id="m-0", address=RANKS_HOST, port=8000),)))
    try:
        yield follows, ranks
    finally:
        await follows.close()
        for each in ranks:
            await each.close()


@asynccontextmanager
async def answering(answer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], object]) -> AsyncIterator[int]:
    """Serve connections on the first publisher's host; yield the port."""
    writers: list[asyncio.StreamWriter] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        with suppress(OSError, asyncio.IncompleteReadError):
            answered = answer(reader, writer)
            if asyncio.iscoroutine(answered):
                await answered

    server = await asyncio.start_server(accept, "127.0.0.2", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        await stop_accepting(server)
        server.close()
        for each in writers:
            each.close()


async def zmtp(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *frames: bytes) -> None:
    """Answer the handshake of a subscriber, and send frames."""
    writer.write(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
    await reader.readexactly(64)
    ready = b"\x05READY\x0bSocket-Type" + (3).to_bytes(4, "big") + b"PUB"
    writer.write(bytes((4, len(ready))) + ready + b"".join(frames))


def frames_of(*frames: bytes) -> bytes:
    last = len(frames) - 1
    return b"".join(bytes((number < last, len(each))) + each for number, each in enumerate(frames))


def logged(caplog: pytest.LogCaptureFixture, sentence: str = "KV events are incomplete") -> list[str]:
    return [each.__dict__["details"].get("reason", "") for each in caplog.records if each.getMessage() == sentence]
