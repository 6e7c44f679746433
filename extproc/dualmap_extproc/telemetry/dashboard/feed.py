"""Who looks at the dashboard, and what they are sent: one snapshot a second while anybody does, nothing otherwise.

A snapshot is made once for all who look at the same pool. Each of them has room for one: who is too slow for one a
second misses some, and nothing queues up. Knows no HTTP; ``routes`` does.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from typing import Final

from dualmap_extproc.telemetry.dashboard.snapshot import Snapshots

EVERY_S: Final = 1.0
WATCHERS: Final = 32
"""So many may look at once; each costs a connection and what docs/dashboard.md says."""


class TooManyWatchers(Exception):
    """WATCHERS look at the dashboard already."""


class Watcher:
    """One who looks at ``pool``, and the newest snapshot that was not fetched yet."""

    def __init__(self, pool: str) -> None:
        self.pool = pool
        self._newest: bytes | None = None
        self._closed = False
        self._changed = asyncio.Event()

    def offer(self, snapshot: bytes) -> None:
        """Put the newest snapshot in the place of any that was not fetched."""
        self._newest = snapshot
        self._changed.set()

    def close(self) -> None:
        """Have ``next`` return None from now on."""
        self._closed = True
        self._changed.set()

    async def next(self) -> bytes | None:
        """Wait for a snapshot that was not returned before; None when there will be none."""
        await self._changed.wait()
        self._changed.clear()
        newest, self._newest = self._newest, None
        return None if self._closed else newest


class Feed:
    """Sends snapshots to those who look. Belongs to the event loop."""

    def __init__(self, snapshots: Snapshots, *, every_s: float = EVERY_S) -> None:
        self._snapshots = snapshots
        self._every_s = every_s
        self._watchers: set[Watcher] = set()
        self._sending: asyncio.Task[None] | None = None
        # The last snapshots by pool, and when they were taken.
        self._documents: dict[str, bytes] = {}
        self._taken_s = -inf
        self._closed = False

    @contextmanager
    def watching(self, pool: str) -> Iterator[Watcher]:
        """Look at ``pool`` (empty: the first one) within the context. Raises TooManyWatchers."""
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
        """Send nothing more; whoever looks is told."""
        self._closed = True
        for watcher in self._watchers:
            watcher.close()

    async def _send(self) -> None:
        clock = asyncio.get_running_loop().time
        try:
            while True:
                # However often people come and go, no more than one a second.
                await asyncio.sleep(self._taken_s + self._every_s - clock())
                self._taken_s = clock()
                wanted = {watcher.pool for watcher in self._watchers}
                self._documents = await asyncio.to_thread(self._snapshots.tell, self._snapshots.look(), wanted)
                for watcher in self._watchers:
                    # Who has come meanwhile may look at a pool that nobody looked at.
                    if watcher.pool in self._documents:
                        watcher.offer(self._documents[watcher.pool])
        finally:
            # Should a snapshot fail, nobody is left waiting: pages say that they are cut off, and come back.
            for watcher in self._watchers:
                watcher.close()
