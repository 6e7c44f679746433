"""Sends access log entries about other routers' requests to these routers.

Of several routers behind one DNS name, Envoy sends an entry to any. Only the router that picked the request's member
can use the entry.
"""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

from dualmap_edge.logs import OncePerMinute, get_logger
from dualmap_extproc.request.ending import AccessLogEntry

# A new router may pick members some seconds before its connections to the other routers exist.
KEPT_S: Final = 10.0
RETRY_S: Final = 0.5
# The most entries that wait for a connection. An entry has less than 1 KiB.
KEPT_MAX: Final = 10_000
_log = get_logger(__name__)


Forward: TypeAlias = Callable[[AccessLogEntry], bool]
"""Sends an entry to the router that picked the request's member; returns whether a connection to this router exists."""


class ForwardingObserver(Protocol):
    """The counter of undelivered entries; ``telemetry.metrics`` implements this interface."""

    def access_log_undelivered(self, count: int) -> None:
        """Count entries about requests of a router to which no connection exists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    entry: AccessLogEntry
    until_s: float


class Forwarding:
    """Sends entries by ``forward``; keeps the entries of a router without a connection for up to KEPT_S.

    Without ``forward``, the router knows no other routers, and each entry counts as undelivered.
    """

    def __init__(self, forward: Forward | None, observer: ForwardingObserver, *, clock: Callable[[], float]) -> None:
        self._forward = forward
        self._observer = observer
        self._clock = clock
        self._kept: list[_Kept] = []
        self._retry: asyncio.TimerHandle | None = None
        self._undelivered = OncePerMinute(_log, "Dropping access log entries of routers without a connection", clock)

    def forward(self, entries: Iterable[AccessLogEntry]) -> None:
        """Send entries, each with its sender, to the routers of their requests."""
        until_s = self._clock() + KEPT_S
        for entry in entries:
            if self._forward is None:
                self._drop(entry)
            elif not self._forward(entry):
                self._keep(_Kept(entry=entry, until_s=until_s))

    def _keep(self, kept: _Kept) -> None:
        if len(self._kept) >= KEPT_MAX:
            self._drop(kept.entry)
            return
        self._kept.append(kept)
        if self._retry is None:
            self._retry = asyncio.get_running_loop().call_later(RETRY_S, self._try_again)

    def _try_again(self) -> None:
        self._retry = None
        assert self._forward is not None
        now_s = self._clock()
        waiting, self._kept = self._kept, []
        for each in waiting:
            if self._forward(each.entry):
                continue
            if each.until_s <= now_s:
                self._drop(each.entry)
            else:
                self._keep(each)

    def _drop(self, entry: AccessLogEntry) -> None:
        self._observer.access_log_undelivered(1)
        self._undelivered.warn(1, request=entry.request_id)
