"""The gRPC access log service (ALS): receives an entry about the end of each request from every Envoy.

Every Envoy sends every entry to one router or to every router, in batches. ``app.wiring`` passes this router's entries
to the picker, and other routers' entries to these routers. The router that picked verifies an entry's id. The sink
counts and drops a batch that cannot be parsed. The sink also counts and drops an entry about a request that
another client of the router sent, because any program that reaches the port could otherwise end requests.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any, Final, Protocol, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from dualmap_edge.logs import OncePerMinute, get_logger
from dualmap_extproc.envoy.access_log.entry import read_entry, read_id
from dualmap_extproc.names import ACCESS_LOG_METHOD, ACCESS_LOG_SERVICE
from dualmap_extproc.request.ending import AccessLogEntry
from dualmap_extproc.request.ids import RequestIds
from dualmap_extproc.wire import access_log_pb2 as wire
from dualmap_extproc.wire.peer import peer_of

# The most entries that the sink reads without a pause. An entry takes 10 to 40 us, so a batch from Envoy takes
# milliseconds.
ENTRIES_AT_ONCE: Final = 100

_Context: TypeAlias = "grpc.aio.ServicerContext[bytes, wire.StreamAccessLogsResponse]"
_log = get_logger(__name__)


class AccessLogObserver(Protocol):
    """The counters of access log entries; ``telemetry.metrics`` implements this interface."""

    def access_log_entries(self, *, known: int, others: int) -> None:
        """Count a batch's entries with a request id (``known``) and without a request id (``others``)."""

    def access_log_unreadable(self) -> None:
        """Count a batch that cannot be parsed; its entries are lost."""

    def access_log_foreign(self, count: int) -> None:
        """Count entries about requests of this router that another client sent, or with forged ids."""


class AccessLogSink:
    """The access log service: passes the entries of each batch to ``on_entries``, on the event loop.

    A router may receive the entries of all routers. An entry with an id that does not begin with the prefix of ``ids``
    goes to ``forward``, which sends it to its router if it can; without ``forward``, the service skips the entry. The
    check of an entry's prefix costs 1 us; reading the entry costs 10 us. Of the entries of this router, the service
    passes on those that ``ids`` made for requests of the same client (``wire.peer``).
    """

    def __init__(
        self,
        on_entries: Callable[[tuple[AccessLogEntry, ...]], None],
        observer: AccessLogObserver,
        *,
        ids: RequestIds,
        forward: Callable[[AccessLogEntry], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._on_entries = on_entries
        self._observer = observer
        self._ids = ids
        self._forward = forward
        self._unreadable = OncePerMinute(_log, "Dropping unreadable access log batches", clock)
        self._foreign = OncePerMinute(_log, "Ignoring access log entries about another client's requests", clock)

    def handler(self) -> "grpc.GenericRpcHandler[Any, Any]":
        """Return the service's handler, for registration in grpc.aio."""
        # The method has no deserializer, so that a batch that is not protobuf does not end the stream.
        method = grpc.stream_unary_rpc_method_handler(
            self._receive, response_serializer=wire.StreamAccessLogsResponse.SerializeToString
        )
        return grpc.method_handlers_generic_handler(ACCESS_LOG_SERVICE, {ACCESS_LOG_METHOD: method})

    async def _receive(self, batches: AsyncIterator[bytes], context: _Context) -> wire.StreamAccessLogsResponse:
        """Read the batches of one Envoy worker until the worker closes its stream."""
        peer = peer_of(context)
        async for data in batches:
            try:
                batch = wire.StreamAccessLogsMessage.FromString(data)
            except DecodeError as error:
                self._observer.access_log_unreadable()
                self._unreadable.warn(1, peer=peer, size=len(data), reason=str(error))
                continue
            entries = batch.http_logs.log_entry
            for start in range(0, len(entries), ENTRIES_AT_ONCE):
                some = entries[start : start + ENTRIES_AT_ONCE]
                ids = [read_id(entry) for entry in some]
                without = ids.count("")
                self._observer.access_log_entries(known=len(ids) - without, others=without)
                prefix = self._ids.prefix
                picked = [each for each in zip(some, ids, strict=True) if each[1]]
                ours = [each for each in picked if each[1].startswith(prefix)]
                if self._forward is not None and len(ours) < len(picked):
                    for entry, request_id in picked:
                        if not request_id.startswith(prefix):
                            self._forward(replace(read_entry(entry, request_id), sender=peer))
                believed = [each for each in ours if self._ids.is_from(each[1], peer)]
                if len(believed) < len(ours):
                    self._observer.access_log_foreign(len(ours) - len(believed))
                    self._foreign.warn(len(ours) - len(believed), peer=peer)
                self._on_entries(tuple(read_entry(entry, request_id) for entry, request_id in believed))
                # The pause lets the event loop serve requests that wait for their pick.
                await asyncio.sleep(0)
        return wire.StreamAccessLogsResponse()
