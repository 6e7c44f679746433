"""Passes a snapshot per second to open dashboard pages, and no snapshot while no page is open.

All pages of a pool share one snapshot. The feed keeps only the newest unread snapshot for each page, so a slow page
skips older snapshots. This module does not use HTTP; ``routes`` sends the snapshots over HTTP.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from typing import Final

from dualmap_extproc.telemetry.dashboard.snapshot import Snapshots

EVERY_S: Final = 1.0
WATCHERS: Final = 32
"""The largest number of open pages; docs/dashboard.md gives the cost of a page."""


class TooManyWatchers(Exception):
    """The limit of open pages (WATCHERS) is reached."""


class Watcher:
    """An open page of ``pool``, with the newest snapshot that the page has not read."""

    def __init__(self, pool: str) -> None:
        self.pool = pool
        self._newest: bytes | None = None
        self._closed = False
        self._changed = asyncio.Event()

    def offer(self, snapshot: bytes) -> None:
        """Set the newest snapshot; it replaces an unread snapshot."""
        self._newest = snapshot
        self._changed.set()

    def close(self) -> None:
        """End the watcher: ``next`` returns None from now on."""
        self._closed = True
        self._changed.set()

    async def next(self) -> bytes | None:
        """Wait for the next snapshot and return it; return None after ``close``."""
        await self._changed.wait()
        self._changed.clear()
        newest, self._newest = self._newest, None
        return None if self._closed else newest


class Feed:
    """The sender of snapshots to watchers. All calls must come from the event loop's thread."""

    def __init__(self, snapshots: Snapshots, *, every_s: float = EVERY_S) -> None:
        self._snapshots = snapshots
        self._every_s = every_s
        self._watchers: set[Watcher] = set()
        self._sending: asyncio.Task[None] | None = None
        # The last snapshots by pool, and the time when they were taken.
        self._documents: dict[str, bytes] = {}
        self._taken_s = -inf
        self._closed = False

    @contextmanager
    def watching(self, pool: str) -> Iterator[Watcher]:
        """Watch ``pool`` (empty: the first pool) within the context. Raises TooManyWatchers."""
        if len(self._watchers) >= WATCHERS:
            raise TooManyWatchers
        watcher = Watcher(pool)
        self._watchers.add(watcher)
        try:
            if self._closed:
                watcher.close()
            elif self._sending is None or self._sending.done():
                self._sending = asyncio.create_task(self._send())
            elif pool in self._documents:
                watcher.offer(self._documents[pool])
            yield watcher
        finally:
            self._watchers.discard(watcher)
            if not self._watchers and self._sending is not None:
                self._sending.cancel()
                self._sending = None

    def close(self) -> None:
        """Stop sending, and end every watcher."""
        self._closed = True
        for watcher in self._watchers:
            watcher.close()

    async def _send(self) -> None:
        clock = asyncio.get_running_loop().time
        try:
            while True:
                # The feed takes at most one snapshot per second, even if pages often open and close.
                await asyncio.sleep(self._taken_s + self._every_s - clock())
                self._taken_s = clock()
                wanted = {watcher.pool for watcher in self._watchers}
                self._documents = await asyncio.to_thread(self._snapshots.tell, self._snapshots.look(), wanted)
                for watcher in self._watchers:
                    # If a page opened while the snapshots were made, its pool may have no snapshot.
                    if watcher.pool in self._documents:
                        watcher.offer(self._documents[watcher.pool])
        finally:
            # If a snapshot fails, the feed closes all watchers. The pages then show the disconnection and reconnect.
            for watcher in self._watchers:
                watcher.close()
