"""Sends access log entries about other routers' requests to these routers.

Of several routers behind one DNS name, Envoy sends an entry to any. Only the router that picked the request's member
can use the entry.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Protocol

from dualmap_edge.logs import OncePerMinute, get_logger
from dualmap_extproc.envoy.access_log.entry import read_entry
from dualmap_extproc.request.ending import AccessLogEntry
from dualmap_extproc.request.ids import router_of
from dualmap_extproc.wire import access_log_pb2 as wire

# A new router may pick members some seconds before its connections to the other routers exist. After this time, a
# router without a connection has ended, and the other routers know it.
KEPT_S: Final = 5.0
RETRY_S: Final = 0.5
# The most entries that wait for a connection, the most sent ones, and the most copies. An entry has less than 1 KiB.
KEPT_MAX: Final = 10_000
# The most entries within a second that go to all routers. Any program that reaches the port can cause such entries.
ORPHANS_PER_S: Final = 500
_log = get_logger(__name__)


class Connections(Protocol):
    """The connections to the other routers; ``peers`` implements this interface."""

    def forward(self, entry: AccessLogEntry) -> bool:
        """Send an entry to the router that picked the request's member; return whether it is connected."""

    def reaches(self, request_id: str) -> bool:
        """Return whether the router that picked a request's member is connected and not about to end."""

    def orphan(self, entry: AccessLogEntry) -> None:
        """Send an entry to all routers, because the router that picked has ended."""

    def on_lost(self, lost: Callable[[str], None]) -> None:
        """Set the function to call with the name of each router to which a connection is lost."""


class ForwardingObserver(Protocol):
    """The counter of undelivered entries; ``telemetry.metrics`` implements this interface."""

    def access_log_undelivered(self, count: int) -> None:
        """Count entries about requests of a router to which no connection exists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    entry: AccessLogEntry
    until_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Copy:
    request_id: str
    entry: wire.HTTPAccessLogEntry
    until_s: float


class Forwarding:
    """Sends entries to their routers; keeps the entries of a router without a connection for up to KEPT_S.

    The entries of a router that has ended go to all other routers and to ``on_orphan``, because the pool's owner still
    accounts for the requests. If a connection is lost, the entries that were sent within KEPT_S are sent again, because
    the router may have ended before it has received or reported them. Entries above KEPT_MAX or ORPHANS_PER_S are
    dropped. The owner's account of their requests then expires. Without ``connections``, the router knows no other
    routers.
    """

    def __init__(
        self,
        connections: Connections | None,
        on_orphan: Callable[[AccessLogEntry], None],
        observer: ForwardingObserver,
        *,
        clock: Callable[[], float],
    ) -> None:
        self._connections = connections
        self._on_orphan = on_orphan
        self._observer = observer
        self._clock = clock
        self._kept: list[_Kept] = []
        # The last entries that were sent, the oldest first.
        self._sent: deque[_Kept] = deque(maxlen=KEPT_MAX)
        # The last entries that their routers received, too, the oldest first.
        self._copies: deque[_Copy] = deque(maxlen=KEPT_MAX)
        self._retry: asyncio.TimerHandle | None = None
        # The beginning of the current second, and the number of entries that went to all routers since then.
        self._second_s = clock()
        self._orphans = 0
        self._undelivered = OncePerMinute(_log, "No connection to the router of an access log entry", clock)
        if connections is not None:
            connections.on_lost(self._on_lost)

    def forward(self, entries: Iterable[AccessLogEntry]) -> None:
        """Send entries, each with its sender, to the routers of their requests."""
        until_s = self._clock() + KEPT_S
        for entry in entries:
            if self._connections is None:
                self._on_orphan(entry)
                self._drop()
            elif not self._forward(self._connections, entry):
                self._keep(_Kept(entry=entry, until_s=until_s))

    def watch(self, entries: Iterable[tuple[wire.HTTPAccessLogEntry, str]]) -> None:
        """Take entries, with their requests' ids, of which every router gets its own copy.

        The entries of a router that has ended or is about to end go to ``on_orphan``, because the pool's owner still
        accounts for the requests. The others are kept unread for KEPT_S, because this router notices the end of their
        router later than Envoy. Without other routers, the entries are dropped.
        """
        if self._connections is None:
            return
        now_s, reaches = self._clock(), self._connections.reaches
        while self._copies and self._copies[0].until_s <= now_s:
            self._copies.popleft()
        for entry, request_id in entries:
            if reaches(request_id):
                self._copies.append(_Copy(request_id=request_id, entry=entry, until_s=now_s + KEPT_S))
            else:
                self._on_orphan(read_entry(entry, request_id))

    def end(self) -> None:
        """Send all entries to all routers whose own router may not use them, because this router ends."""
        if self._connections is None:
            return
        if self._retry is not None:
            self._retry.cancel()
        reaches = self._connections.reaches
        for each in (*self._kept, *(each for each in self._sent if not reaches(each.entry.request_id))):
            self._connections.orphan(each.entry)
        self._kept.clear()
        self._sent.clear()

    def _forward(self, connections: Connections, entry: AccessLogEntry) -> bool:
        """Send an entry to its router, and remember it for KEPT_S; return whether there is a connection."""
        if not connections.forward(entry):
            return False
        now_s = self._clock()
        while self._sent and self._sent[0].until_s <= now_s:
            self._sent.popleft()
        self._sent.append(_Kept(entry=entry, until_s=now_s + KEPT_S))
        return True

    def _on_lost(self, router: str) -> None:
        """Keep the last entries that were sent to a lost router, and take the copies of those that it received."""
        sent, self._sent = self._sent, deque(maxlen=KEPT_MAX)
        for each in sent:
            if router_of(each.entry.request_id) == router:
                self._keep(each)
            else:
                self._sent.append(each)
        copies, self._copies = self._copies, deque(maxlen=KEPT_MAX)
        now_s = self._clock()
        for copy in copies:
            if router_of(copy.request_id) != router:
                self._copies.append(copy)
            elif copy.until_s > now_s:
                self._on_orphan(read_entry(copy.entry, copy.request_id))

    def _keep(self, kept: _Kept) -> None:
        if len(self._kept) >= KEPT_MAX:
            self._drop()
            return
        self._kept.append(kept)
        if self._retry is None:
            self._retry = asyncio.get_running_loop().call_later(RETRY_S, self._try_again)

    def _try_again(self) -> None:
        self._retry = None
        assert self._connections is not None
        now_s = self._clock()
        waiting, self._kept = self._kept, []
        for each in waiting:
            if self._forward(self._connections, each.entry):
                continue
            if each.until_s <= now_s:
                self._orphan(self._connections, each.entry, now_s)
            else:
                self._keep(each)

    def _orphan(self, connections: Connections, entry: AccessLogEntry, now_s: float) -> None:
        """Send an entry of a router that has ended to all others, unless there were too many within a second."""
        if now_s - self._second_s >= 1.0:
            self._second_s, self._orphans = now_s, 0
        if self._orphans < ORPHANS_PER_S:
            self._orphans += 1
            connections.orphan(entry)
            self._on_orphan(entry)
        self._drop()

    def _drop(self) -> None:
        # The log does not contain the entry, because any program that reaches the port may have written it.
        self._observer.access_log_undelivered(1)
        self._undelivered.warn(1)
