"""The gRPC access log service (ALS): receives entries about the ends of requests from every Envoy.

An Envoy sends its entries in batches, either every entry to every router, or each entry to any router. In the second
case, the entries of the shared log, ``forwarding`` sends other routers' entries to them. ``app.wiring`` passes this
router's entries to the picker. The router that picked verifies the id of a forwarded entry. The sink counts and drops a
batch that cannot be parsed. The sink also counts and drops an entry about a request that another client of the router
sent, because any program that reaches the port could otherwise end requests.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any, Final, Protocol, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from dualmap_edge.logs import OncePerMinute, get_logger
from dualmap_extproc.envoy.access_log.entry import read_entry, read_id
from dualmap_extproc.envoy.access_log.forwarding import Connections, Forwarding, ForwardingObserver
from dualmap_extproc.names import ACCESS_LOG_METHOD, ACCESS_LOG_SERVICE, SHARED_ACCESS_LOG
from dualmap_extproc.request.ending import AccessLogEntry
from dualmap_extproc.request.ids import RequestIds
from dualmap_extproc.wire import access_log_pb2 as wire
from dualmap_extproc.wire.peer import peer_of

# The most entries that the sink reads without a pause. An entry takes 10 to 40 us, so a batch from Envoy takes
# milliseconds.
ENTRIES_AT_ONCE: Final = 100
LAST_BATCH_S: Final = 2.0
"""A router that ends waits for the next batch of each stream until the stream had none for this time."""
# The time after this batch in which a router that was busy reads the batches that have arrived meanwhile.
_BUSY_S: Final = 0.03

_Context: TypeAlias = "grpc.aio.ServicerContext[bytes, wire.StreamAccessLogsResponse]"
_log = get_logger(__name__)


class AccessLogObserver(ForwardingObserver, Protocol):
    """The counters of access log entries; ``telemetry.metrics`` implements this interface."""

    def access_log_entries(self, *, known: int, others: int) -> None:
        """Count a batch's entries with a request id (``known``) and without a request id (``others``)."""

    def access_log_unreadable(self) -> None:
        """Count a batch that cannot be parsed; its entries are lost."""

    def access_log_foreign(self, count: int) -> None:
        """Count entries about requests of this router that another client sent, or with forged ids."""


class AccessLogSink:
    """The access log service: passes the entries of each batch to ``on_entries``, on the event loop.

    Entries of this router have an id that begins with the prefix of ``ids``. The check of an entry's prefix costs 1 us;
    reading the entry would cost 10 us. Of the entries of this router, the service passes on those that ``ids`` made for
    requests of the same client (``wire.peer``). The service sends the other routers' entries of the shared log to their
    routers by ``connections``. Every router gets the entries of another log, so the service skips the other routers'
    entries. ``on_orphan`` receives the entries of routers that have ended. ``connections`` is None if the router knows
    no other routers.
    """

    def __init__(
        self,
        on_entries: Callable[[tuple[AccessLogEntry, ...]], None],
        observer: AccessLogObserver,
        *,
        ids: RequestIds,
        connections: Connections | None = None,
        on_orphan: Callable[[AccessLogEntry], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._on_entries = on_entries
        self._forwarding = Forwarding(connections, on_orphan, observer, clock=clock)
        self._loop = asyncio.get_running_loop()
        # The time at which all streams end, when the router ends.
        self._ends_s: asyncio.Future[float] = self._loop.create_future()
        self._streams = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._observer = observer
        self._ids = ids
        self._unreadable = OncePerMinute(_log, "Dropping unreadable access log batches", clock)
        self._foreign = OncePerMinute(_log, "Ignoring access log entries about another client's requests", clock)

    def handler(self) -> "grpc.GenericRpcHandler[Any, Any]":
        """Return the service's handler, for registration in grpc.aio."""
        # The method has no deserializer, so that a batch that is not protobuf does not end the stream.
        method = grpc.stream_unary_rpc_method_handler(
            self._receive, response_serializer=wire.StreamAccessLogsResponse.SerializeToString
        )
        return grpc.method_handlers_generic_handler(ACCESS_LOG_SERVICE, {ACCESS_LOG_METHOD: method})

    async def end(self) -> None:
        """End all streams, so that Envoy opens new streams to other routers, and send on all entries that wait.

        Each stream ends after its next batch. Envoy sends a batch every 100 ms while requests end. Directly after a
        batch, no entry is on its way. A stream also ends when it had no batch for LAST_BATCH_S. New streams must be
        rejected. The method must be called once.
        """
        self._ends_s.set_result(self._loop.time() + LAST_BATCH_S)
        await self._idle.wait()
        self._forwarding.end()

    async def _receive(self, batches: AsyncIterator[bytes], context: _Context) -> wire.StreamAccessLogsResponse:
        """Read the batches of one Envoy worker until the worker or ``end`` ends the stream."""
        self._streams += 1
        self._idle.clear()
        try:
            await self._take_all(peer_of(context), batches)
        finally:
            self._streams -= 1
            if not self._streams:
                self._idle.set()
        return wire.StreamAccessLogsResponse()

    async def _take_all(self, client: str, batches: AsyncIterator[bytes]) -> None:
        shared, longest_s = False, LAST_BATCH_S
        reads = aiter(batches)
        while (data := await self._next(reads, longest_s)) is not None:
            # Only the first batch of a stream has the log's name.
            shared = await self._take(client, data, shared=shared)
            if self._ends_s.done():
                longest_s = _BUSY_S

    async def _next(self, reads: AsyncIterator[bytes], longest_s: float) -> bytes | None:
        """Return the next batch; None after the stream's end, and after ``longest_s`` if the router ends."""
        read = asyncio.create_task(_read(reads))
        due_s = self._loop.time() + longest_s
        try:
            await asyncio.wait((read, self._ends_s), return_when=asyncio.FIRST_COMPLETED)
            if not read.done():
                due_s = min(due_s, self._ends_s.result())
                await asyncio.wait((read,), timeout=max(0.0, due_s - self._loop.time()))
        finally:
            read.cancel()
        return read.result() if read.done() and not read.cancelled() else None

    async def _take(self, client: str, data: bytes, *, shared: bool) -> bool:
        """Read one batch; return whether the batches of its stream are of the shared log."""
        try:
            batch = wire.StreamAccessLogsMessage.FromString(data)
        except DecodeError as error:
            self._observer.access_log_unreadable()
            self._unreadable.warn(1, peer=client, size=len(data), reason=str(error))
            return shared
        if batch.HasField("identifier"):
            shared = batch.identifier.log_name == SHARED_ACCESS_LOG
        entries = batch.http_logs.log_entry
        for start in range(0, len(entries), ENTRIES_AT_ONCE):
            self._take_some(client, entries[start : start + ENTRIES_AT_ONCE], shared=shared)
            # The pause lets the event loop serve requests that wait for their pick.
            await asyncio.sleep(0)
        return shared

    def _take_some(self, client: str, entries: Sequence[wire.HTTPAccessLogEntry], *, shared: bool) -> None:
        known = [(entry, request_id) for entry in entries if (request_id := read_id(entry))]
        self._observer.access_log_entries(known=len(known), others=len(entries) - len(known))
        prefix = self._ids.prefix
        ours = [each for each in known if each[1].startswith(prefix)]
        believed = [each for each in ours if self._ids.is_from(each[1], client)]
        if len(believed) < len(ours):
            self._observer.access_log_foreign(len(ours) - len(believed))
            self._foreign.warn(len(ours) - len(believed), peer=client)
        self._on_entries(tuple(read_entry(entry, request_id) for entry, request_id in believed))
        theirs = (each for each in known if not each[1].startswith(prefix))
        if shared:
            self._forwarding.forward(replace(read_entry(*each), sender=client) for each in theirs)
        else:
            self._forwarding.watch(theirs)


async def _read(reads: AsyncIterator[bytes]) -> bytes | None:
    return await anext(reads, None)
