"""Sends access log entries about other routers' requests to these routers.

Of several routers behind one DNS name, Envoy sends an entry to any. Only the router that picked the request's member
can use the entry.
"""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Protocol

from dualmap_edge.logs import OncePerMinute, get_logger
from dualmap_extproc.request.ending import AccessLogEntry

# A new router may pick members some seconds before its connections to the other routers exist. After this time, a
# router without a connection has ended, and the other routers know it.
KEPT_S: Final = 5.0
RETRY_S: Final = 0.5
# The most entries that wait for a connection. An entry has less than 1 KiB.
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


class ForwardingObserver(Protocol):
    """The counter of undelivered entries; ``telemetry.metrics`` implements this interface."""

    def access_log_undelivered(self, count: int) -> None:
        """Count entries about requests of a router to which no connection exists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    entry: AccessLogEntry
    until_s: float
    forwards: bool = True


class Forwarding:
    """Sends entries to their routers; keeps the entries of a router without a connection for up to KEPT_S.

    The entries of a router that has ended go to all other routers and to ``on_orphan``, because the pool's owner still
    accounts for the requests. Entries above KEPT_MAX or ORPHANS_PER_S are dropped. The owner's account of their
    requests then expires. Without ``connections``, the router knows no other routers.
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
        self._retry: asyncio.TimerHandle | None = None
        # The beginning of the current second, and the number of entries that went to all routers since then.
        self._second_s = clock()
        self._orphans = 0
        self._undelivered = OncePerMinute(_log, "No connection to the router of an access log entry", clock)

    def forward(self, entries: Iterable[AccessLogEntry]) -> None:
        """Send entries, each with its sender, to the routers of their requests."""
        until_s = self._clock() + KEPT_S
        for entry in entries:
            if self._connections is None:
                self._on_orphan(entry)
                self._drop()
            elif not self._connections.forward(entry):
                self._keep(_Kept(entry=entry, until_s=until_s))

    def watch(self, entries: Iterable[AccessLogEntry]) -> None:
        """Take entries of which every router gets its own copy: those of routers that have ended or are about to end.

        The pool's owner still accounts for the requests of such a router, until it notices the loss of the router.
        """
        until_s = self._clock() + KEPT_S
        for entry in entries:
            self._on_orphan(entry)
            self._keep(_Kept(entry=entry, until_s=until_s, forwards=False))

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
            if not each.forwards:
                self._on_orphan(each.entry)
                if each.until_s > now_s:
                    self._keep(each)
                continue
            if self._connections.forward(each.entry):
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
