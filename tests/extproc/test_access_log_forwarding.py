"""Tests of entries of a shared access log: a router sends the other routers' entries to these routers."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress

import grpc
import grpc.aio
import pytest

from dualmap_extproc.envoy.access_log import forwarding
from dualmap_extproc.envoy.access_log import sink as sink_module
from dualmap_extproc.envoy.access_log.forwarding import KEPT_MAX, KEPT_S, ORPHANS_PER_S, Forwarding
from dualmap_extproc.envoy.access_log.sink import AccessLogSink
from dualmap_extproc.names import ACCESS_LOG, SHARED_ACCESS_LOG
from dualmap_extproc.request.ending import AccessLogEntry
from dualmap_extproc.request.ids import KEY_BYTES, RequestIds
from dualmap_extproc.wire import access_log_pb2 as wire
from extproc import transports
from extproc.test_access_log import METHOD, Counts, Stream, entry
from waiting import WAIT_S, until

pytestmark = pytest.mark.usefixtures("transport")


class Routers:
    """The sinks of several routers; each router sends entries to the others that are connected."""

    def __init__(self, *names: str) -> None:
        self.received: dict[str, list[AccessLogEntry]] = {name: [] for name in names}
        self.orphans: dict[str, list[AccessLogEntry]] = {name: [] for name in names}
        self.counts = {name: Counts() for name in names}
        self.ids = {name: RequestIds(name, bytes([number]) * KEY_BYTES) for number, name in enumerate(names)}
        self.now_s = 1000.0
        self.connected = set(names)
        self.leaving: set[str] = set()
        self.on_lost_calls: list[Callable[[str], None]] = []
        self.sinks = {name: self._sink(name) for name in names}

    def _sink(self, name: str) -> AccessLogSink:
        return AccessLogSink(
            self.received[name].extend,
            self.counts[name],
            ids=self.ids[name],
            connections=self,
            on_orphan=self.orphans[name].append,
            clock=lambda: self.now_s,
        )

    def forward(self, sent: AccessLogEntry) -> bool:
        to = [name for name in self.connected if sent.request_id.startswith(f"{name}-")]
        for name in to:
            self.received[name].append(sent)
        return bool(to)

    def reaches(self, request_id: str) -> bool:
        return any(request_id.startswith(f"{name}-") for name in self.connected - self.leaving)

    def orphan(self, sent: AccessLogEntry) -> None:
        for name in self.connected:
            self.orphans[name].append(sent)

    def on_lost(self, lost: Callable[[str], None]) -> None:
        self.on_lost_calls.append(lost)

    def lose(self, name: str) -> None:
        """End a router: the others lose their connections to it."""
        self.connected.remove(name)
        for lost in self.on_lost_calls:
            lost(name)

    def received_ids(self, name: str) -> list[str]:
        return [each.request_id for each in self.received[name]]


@asynccontextmanager
async def serving(sink: AccessLogSink) -> AsyncIterator[Callable[[], Stream]]:
    async with (
        transports.serving((sink.handler(),)) as port,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        method = channel.stream_unary(METHOD, bytes, wire.StreamAccessLogsResponse.FromString)
        yield lambda: method(None)


def batch(ids: Sequence[str], log: str | None = None) -> bytes:
    message = wire.StreamAccessLogsMessage()
    if log is not None:
        message.identifier.log_name = log
    message.http_logs.log_entry.extend(entry(each) for each in ids)
    return message.SerializeToString()


async def report(sink: AccessLogSink, *batches: bytes) -> None:
    async with serving(sink) as opened:
        stream = opened()
        for each in batches:
            await stream.write(each)
        await stream.done_writing()
        await stream


async def test_shared_log_entries_reach_the_routers_that_picked() -> None:
    routers = Routers("a-1", "b-2")
    ours, theirs = (routers.ids[name].new("127.0.0.1") for name in ("a-1", "b-2"))
    later = routers.ids["b-2"].new("127.0.0.1")
    # Only the first batch of a stream names the log.
    await report(routers.sinks["a-1"], batch([ours, theirs, "-"], SHARED_ACCESS_LOG), batch([later]))
    assert routers.received_ids("a-1") == [ours]
    assert routers.received_ids("b-2") == [theirs, later]
    assert routers.received["b-2"][0].usage == routers.received["a-1"][0].usage is not None
    assert [each.sender for each in routers.received["a-1"]] == [None]
    assert {each.sender for each in routers.received["b-2"]} == {"127.0.0.1"}
    assert routers.counts["a-1"].known == 3


@pytest.mark.parametrize("log", [ACCESS_LOG, "another", None])
async def test_entries_of_a_log_for_every_router_are_not_forwarded(log: str | None) -> None:
    routers = Routers("a-1", "b-2")
    await report(routers.sinks["a-1"], batch([routers.ids["b-2"].new("127.0.0.1")], log))
    assert routers.received_ids("b-2") == []
    assert routers.counts["a-1"].undelivered == 0


async def test_copy_of_an_entry_is_an_orphan_if_its_router_is_lost_within_the_limit() -> None:
    routers = Routers("a-1", "b-2", "c-3")
    late, last, other = (routers.ids[name].new("127.0.0.1") for name in ("b-2", "b-2", "c-3"))
    async with serving(routers.sinks["a-1"]) as opened:
        stream = opened()
        await stream.write(batch([late], ACCESS_LOG))
        await until(lambda: routers.counts["a-1"].known == 1)
        routers.now_s += KEPT_S
        await stream.write(batch([last, other]))
        await until(lambda: routers.counts["a-1"].known == 3)
        assert routers.orphans["a-1"] == []
        routers.lose("b-2")
        await stream.done_writing()
        await stream
    assert [each.request_id for each in routers.orphans["a-1"]] == [last]


async def test_entry_of_an_ended_router_in_a_log_for_every_router_is_an_orphan() -> None:
    routers = Routers("a-1", "b-2")
    theirs = routers.ids["b-2"].new("127.0.0.1")
    routers.connected.remove("b-2")
    await report(routers.sinks["a-1"], batch([theirs], ACCESS_LOG))
    assert [each.request_id for each in routers.orphans["a-1"]] == [theirs]
    assert routers.counts["a-1"].undelivered == 0


async def test_entries_wait_for_the_connection_of_a_new_router(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwarding, "RETRY_S", 0.01)
    routers = Routers("a-1", "b-2")
    routers.connected.remove("b-2")
    theirs = routers.ids["b-2"].new("127.0.0.1")
    await report(routers.sinks["a-1"], batch([theirs], SHARED_ACCESS_LOG))
    await asyncio.sleep(0.05)
    assert routers.received_ids("b-2") == []
    routers.connected.add("b-2")
    await until(lambda: routers.received_ids("b-2") == [theirs])
    assert routers.counts["a-1"].undelivered == 0


async def test_entries_of_a_router_that_has_ended_go_to_all_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(forwarding, "RETRY_S", 0.01)
    routers = Routers("a-1", "b-2")
    routers.connected.remove("a-1")
    await report(routers.sinks["a-1"], batch(["gone-2-0-ff", "gone-2-1-ff"], SHARED_ACCESS_LOG))
    routers.now_s += KEPT_S - 1
    await asyncio.sleep(0.05)
    assert routers.counts["a-1"].undelivered == 0
    routers.now_s += 1
    await until(lambda: routers.counts["a-1"].undelivered == 2)
    for name in ("a-1", "b-2"):
        assert [each.request_id for each in routers.orphans[name]] == ["gone-2-0-ff", "gone-2-1-ff"]
    (logged,) = [record.__dict__["details"] for record in caplog.records]
    # Any program that reaches the port may have written the entry.
    assert logged == {"count": 1}


async def test_entry_that_was_sent_before_its_router_was_lost_goes_to_all_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(forwarding, "RETRY_S", 0.01)
    routers = Routers("a-1", "b-2", "c-3")
    routers.connected.remove("a-1")
    old, last = (routers.ids["c-3"].new("127.0.0.1") for _ in range(2))
    await report(routers.sinks["a-1"], batch([old], SHARED_ACCESS_LOG))
    routers.now_s += KEPT_S
    await report(routers.sinks["a-1"], batch([last], SHARED_ACCESS_LOG))
    routers.lose("c-3")
    await asyncio.sleep(0.05)
    assert routers.orphans["b-2"] == []
    routers.now_s += KEPT_S
    await until(lambda: routers.orphans["a-1"])
    for name in ("a-1", "b-2"):
        assert [each.request_id for each in routers.orphans[name]] == [last]


async def test_entry_that_was_sent_before_its_connection_was_replaced_is_sent_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(forwarding, "RETRY_S", 0.01)
    routers = Routers("a-1", "b-2")
    theirs = routers.ids["b-2"].new("127.0.0.1")
    await report(routers.sinks["a-1"], batch([theirs], SHARED_ACCESS_LOG))
    routers.lose("b-2")
    routers.connected.add("b-2")
    await until(lambda: routers.received_ids("b-2") == [theirs, theirs])
    assert routers.orphans["a-1"] == []


async def test_entries_that_wait_go_to_all_others_when_the_router_ends() -> None:
    routers = Routers("a-1", "b-2", "c-3", "d-4")
    gone, ending, staying = (routers.ids[name].new("127.0.0.1") for name in ("b-2", "c-3", "d-4"))
    routers.connected -= {"a-1", "b-2"}
    routers.leaving.add("c-3")
    ends = Forwarding(routers, lambda _: None, Counts(), clock=lambda: 0.0)
    ends.forward(AccessLogEntry(request_id=each) for each in (gone, ending, staying))
    ends.end()
    assert [each.request_id for each in routers.orphans["d-4"]] == [gone, ending]


async def test_entries_that_wait_use_bounded_memory() -> None:
    counts = Counts()
    alone = Routers()
    keeping = Forwarding(alone, lambda _: None, counts, clock=lambda: 0.0)
    keeping.forward([AccessLogEntry(request_id="gone-2-0-ff")] * KEPT_MAX)
    assert counts.undelivered == 0
    keeping.forward([AccessLogEntry(request_id="gone-2-0-ff")] * 3)
    assert counts.undelivered == 3


async def test_sent_entries_use_bounded_memory() -> None:
    counts = Counts()
    routers = Routers("a-1", "b-2")
    sending = Forwarding(routers, lambda _: None, counts, clock=lambda: 0.0)
    sending.forward([AccessLogEntry(request_id="b-2-0-ff")] * (KEPT_MAX + 3))
    routers.lose("b-2")
    assert counts.undelivered == 0
    sending.forward([AccessLogEntry(request_id="b-2-0-ff")])
    assert counts.undelivered == 1


async def test_copies_of_entries_use_bounded_memory() -> None:
    routers, taken = Routers("a-1", "b-2"), list[AccessLogEntry]()
    watching = Forwarding(routers, taken.append, Counts(), clock=lambda: 0.0)
    request_id = routers.ids["b-2"].new("127.0.0.1")
    watching.watch([(entry(request_id), request_id)] * (KEPT_MAX + 3))
    routers.lose("b-2")
    assert len(taken) == KEPT_MAX


async def test_entries_above_the_limits_go_to_no_other_router(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwarding, "RETRY_S", 0.01)
    routers = Routers("a-1", "b-2")
    own: list[AccessLogEntry] = []
    keeping = Forwarding(routers, own.append, Counts(), clock=lambda: routers.now_s)
    keeping.forward([AccessLogEntry(request_id="gone-2-0-ff")] * (KEPT_MAX + 3))
    assert routers.orphans["b-2"] == []
    for seconds in (1, 2):
        routers.now_s += KEPT_S
        await until(lambda count=seconds: len(own) == count * ORPHANS_PER_S)
        await asyncio.sleep(0.05)
        assert len(own) == len(routers.orphans["b-2"]) == seconds * ORPHANS_PER_S
        keeping.forward([AccessLogEntry(request_id="gone-2-0-ff")] * KEPT_MAX)


async def test_router_without_other_routers_counts_undelivered_entries() -> None:
    counts = Counts()
    sink = AccessLogSink(lambda _: None, counts, ids=RequestIds("a-1", b"key"))
    await report(sink, batch(["b-2-0-ff", "b-2-1-ff"], SHARED_ACCESS_LOG))
    assert (counts.known, counts.undelivered) == (2, 2)


async def test_ended_stream_ends_after_its_next_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink_module, "LAST_BATCH_S", 600.0)
    routers = Routers("a-1", "b-2")
    sink = routers.sinks["a-1"]
    async with serving(sink) as opened:
        stream = opened()
        ids = [routers.ids["a-1"].new("127.0.0.1") for _ in range(2)]
        await stream.write(batch(ids[:1], SHARED_ACCESS_LOG))
        await until(lambda: routers.received_ids("a-1") == ids[:1])
        await asyncio.sleep(0.1)  # until the sink waits for the next batch
        ending = asyncio.create_task(sink.end())
        await asyncio.sleep(0)
        await stream.write(batch(ids[1:]))
        assert await asyncio.wait_for(stream, WAIT_S) == wire.StreamAccessLogsResponse()
        await asyncio.wait_for(ending, WAIT_S)
    assert routers.received_ids("a-1") == ids


async def test_end_waits_for_the_last_batch_of_each_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink_module, "LAST_BATCH_S", 600.0)
    routers = Routers("a-1", "b-2")
    sink = routers.sinks["a-1"]
    async with serving(sink) as opened:
        streams = [opened() for _ in range(2)]
        ids = [routers.ids["a-1"].new("127.0.0.1") for _ in range(4)]
        for stream, first in zip(streams, ids, strict=False):
            await stream.write(batch([first], SHARED_ACCESS_LOG))
        await until(lambda: set(routers.received_ids("a-1")) == set(ids[:2]))
        ending = asyncio.create_task(sink.end())
        for stream, last in zip(streams, ids[2:], strict=True):
            await asyncio.sleep(0.05)
            assert not ending.done()
            await stream.write(batch([last]))
            assert await asyncio.wait_for(stream, WAIT_S) == wire.StreamAccessLogsResponse()
        await asyncio.wait_for(ending, WAIT_S)
    assert set(routers.received_ids("a-1")) == set(ids)


async def test_batches_that_arrived_while_the_router_was_busy_are_read_before_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sink_module, "LAST_BATCH_S", 600.0)
    monkeypatch.setattr(sink_module, "_BUSY_S", 600.0)
    routers = Routers("a-1", "b-2")
    sink = routers.sinks["a-1"]
    async with serving(sink) as opened:
        stream = opened()
        ids = [routers.ids["a-1"].new("127.0.0.1") for _ in range(3)]
        await stream.write(batch(ids[:1], SHARED_ACCESS_LOG))
        await until(lambda: routers.received_ids("a-1") == ids[:1])
        ending = asyncio.create_task(sink.end())
        await asyncio.sleep(0)
        await stream.write(batch(ids[1:2]))
        await until(lambda: routers.received_ids("a-1") == ids[:2])
        await stream.write(batch(ids[2:]))
        await stream.done_writing()
        await asyncio.wait_for(ending, WAIT_S)
    assert routers.received_ids("a-1") == ids


async def test_stream_with_a_batch_at_any_time_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink_module, "LAST_BATCH_S", 0.2)
    monkeypatch.setattr(sink_module, "_BUSY_S", 600.0)
    routers = Routers("a-1", "b-2")
    async with serving(routers.sinks["a-1"]) as opened:
        stream = opened()
        ending = asyncio.create_task(routers.sinks["a-1"].end())
        # The stream may end during a write.
        with suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
            while not ending.done():
                await stream.write(batch([routers.ids["a-1"].new("127.0.0.1")], SHARED_ACCESS_LOG))
                await asyncio.sleep(0.01)
        await asyncio.wait_for(ending, WAIT_S)


@pytest.mark.parametrize("idle_s", [0.0, 0.2])
async def test_stream_without_a_batch_for_its_limit_ends(monkeypatch: pytest.MonkeyPatch, idle_s: float) -> None:
    monkeypatch.setattr(sink_module, "LAST_BATCH_S", 0.1)
    routers = Routers("a-1", "b-2")
    async with serving(routers.sinks["a-1"]) as opened:
        stream = opened()
        ours = routers.ids["a-1"].new("127.0.0.1")
        await stream.write(batch([ours], SHARED_ACCESS_LOG))
        await until(lambda: routers.received_ids("a-1") == [ours])
        await asyncio.sleep(idle_s)
        await asyncio.wait_for(routers.sinks["a-1"].end(), WAIT_S)
        assert await asyncio.wait_for(stream, WAIT_S) == wire.StreamAccessLogsResponse()


async def test_entries_of_the_last_batch_go_to_all_others_when_the_router_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sink_module, "LAST_BATCH_S", 600.0)
    routers = Routers("a-1", "b-2")
    sink = routers.sinks["a-1"]
    async with serving(sink) as opened:
        stream = opened()
        await stream.write(batch([routers.ids["b-2"].new("127.0.0.1")], SHARED_ACCESS_LOG))
        await until(lambda: routers.received_ids("b-2"))
        ending = asyncio.create_task(sink.end())
        await asyncio.sleep(0)
        await stream.write(batch(["gone-2-0-ff"]))
        await asyncio.wait_for(ending, WAIT_S)
    assert [each.request_id for each in routers.orphans["b-2"]] == ["gone-2-0-ff"]
