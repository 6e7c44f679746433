"""Sends access log entries about other routers' requests to these routers.

Of several routers behind one DNS name, Envoy sends an entry to any. Only the router that picked the request's member
can use the entry. The entry's request id begins with this router's prefix.
"""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Protocol

from dualmap_edge.logs import OncePerMinute, get_logger
from dualmap_extproc.request.ids import router_of
from dualmap_extproc.wire import access_log_pb2 as wire

# A new router may pick members some seconds before its connections to the other routers exist.
KEPT_S: Final = 10.0
RETRY_S: Final = 0.5
# The most bytes of entries that wait for connections. An entry has about 500 bytes.
KEPT_BYTES_MAX: Final = 8 * 1024 * 1024
_log = get_logger(__name__)


class Send(Protocol):
    """Sends entries to another router."""

    def __call__(self, router: str, client: str, batch: bytes) -> bool:
        """Send the batch, and return whether a connection to the router exists.

        ``router`` is the prefix of the router's request ids, without the final hyphen. ``client`` is the identity of
        the Envoy that sent the entries (``wire.peer``). ``batch`` is a serialized StreamAccessLogsMessage.
        """


class ForwardingObserver(Protocol):
    """The counter of undelivered entries; ``telemetry.metrics`` implements this interface."""

    def access_log_undelivered(self, count: int) -> None:
        """Count entries about requests of a router to which no connection exists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    router: str
    client: str
    batch: bytes
    entries: int
    until_s: float


class Forwarding:
    """Sends entries by ``send``; keeps the entries of a router without a connection for up to KEPT_S.

    Without ``send``, the router knows no other routers, and each entry counts as undelivered.
    """

    def __init__(self, send: Send | None, observer: ForwardingObserver, *, clock: Callable[[], float]) -> None:
        self._send = send
        self._observer = observer
        self._clock = clock
        self._kept: list[_Kept] = []
        self._kept_bytes = 0
        self._retry: asyncio.TimerHandle | None = None
        self._undelivered = OncePerMinute(_log, "Dropping access log entries of routers without a connection", clock)

    def forward(self, client: str, entries: Iterable[tuple[wire.HTTPAccessLogEntry, str]]) -> None:
        """Send entries with their request ids, which the Envoy ``client`` sent, to the routers of the requests."""
        batches: dict[str, wire.StreamAccessLogsMessage] = {}
        for entry, request_id in entries:
            batch = batches.setdefault(router_of(request_id), wire.StreamAccessLogsMessage())
            batch.http_logs.log_entry.append(entry)
        for router, batch in batches.items():
            count = len(batch.http_logs.log_entry)
            if self._send is None:
                self._drop(router, count)
                continue
            data = batch.SerializeToString()
            if not self._send(router, client, data):
                until_s = self._clock() + KEPT_S
                self._keep(_Kept(router=router, client=client, batch=data, entries=count, until_s=until_s))

    def _keep(self, batch: _Kept) -> None:
        if self._kept_bytes + len(batch.batch) > KEPT_BYTES_MAX:
            self._drop(batch.router, batch.entries)
            return
        self._kept.append(batch)
        self._kept_bytes += len(batch.batch)
        self._retry_later()

    def _retry_later(self) -> None:
        if self._retry is None:
            self._retry = asyncio.get_running_loop().call_later(RETRY_S, self._try_again)

    def _try_again(self) -> None:
        self._retry = None
        assert self._send is not None
        now_s = self._clock()
        waiting, self._kept, self._kept_bytes = self._kept, [], 0
        for each in waiting:
            if self._send(each.router, each.client, each.batch):
                continue
            if each.until_s <= now_s:
                self._drop(each.router, each.entries)
            else:
                self._kept.append(each)
                self._kept_bytes += len(each.batch)
        if self._kept:
            self._retry_later()

    def _drop(self, router: str, count: int) -> None:
        self._observer.access_log_undelivered(count)
        self._undelivered.warn(count, router=router)
