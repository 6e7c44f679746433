"""The thread that encodes and writes batches of ended requests; it stops while the disk fails, and tries again."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Final

from dualmap.pools.pool import Pool
from dualmap.recordings.values import Header, Line, Missing, PoolChanged, PoolRemoved
from dualmap_edge.logs import get_logger, place_of
from dualmap_extproc.recording.encoding import encoded, encoded_requests
from dualmap_extproc.recording.files import RecordingFiles
from dualmap_extproc.recording.folder import RecordingError, RecordingFolder
from dualmap_extproc.recording.hashing import KeyedHashes, fingerprint
from dualmap_extproc.recording.metrics import RecordingMetrics
from dualmap_extproc.recording.requests import OpenRequest

RETRY_S: Final = 5.0
"""The time from a failed write to the next attempt."""
_MEMBER_BYTES: Final = 10**6
# The requests that are encoded in one go, which takes the thread about 0.2 ms.
_UNINTERRUPTED: Final = 16
_log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What is new at ``now_s``, seconds since the epoch: ended requests, and changed pools (None: removed).

    ``offset_s`` is the time since the epoch at which the requests' clock is 0. ``unrouted`` and ``dropped`` are as in
    ``Missing``.
    """

    now_s: float
    offset_s: float
    requests: Sequence[OpenRequest] = ()
    pools: Sequence[tuple[float, str, Pool | None]] = ()
    unrouted: int = 0
    dropped: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """What the first line of each file says: the router, its version and the recorded share."""

    router: str
    program: str
    sample: float


class Writer:
    """Writes batches to a ``folder``, which it opens again after failures, and describes in each file.

    ``hash_key`` is the key of the hashes that requests have. ``taken`` requests with ``taken_blocks`` have left the
    queue. ``clock`` returns monotonic seconds.
    """

    def __init__(
        self,
        folder: RecordingFolder,
        description: Description,
        metrics: RecordingMetrics,
        *,
        max_bytes: int,
        hash_key: bytes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.metrics = metrics
        self.taken = self.taken_blocks = 0
        self.hashes = None if folder.secret is None else KeyedHashes(folder.secret)
        self._folder = folder
        self._description = description
        self._hash_key = hash_key
        self._clock = clock
        self._files = RecordingFiles(folder.path, max_bytes, self._head)
        self._member_bytes = min(_MEMBER_BYTES, self._files.file_bytes)
        self._pools: dict[str, Pool] = {}
        self._unrouted = self._dropped = 0
        self._retry_s: float | None = None
        self._queue: SimpleQueue[Batch | None] = SimpleQueue()
        # A daemon, because a write to a lost network volume may never return.
        self._thread = threading.Thread(target=self._run, name="recording", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def put(self, batch: Batch) -> None:
        """Let the thread write a batch."""
        self._queue.put(batch)

    def close(self, timeout_s: float) -> None:
        """Write what is queued; wait for at most ``timeout_s``."""
        self._queue.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (batch := self._queue.get()) is not None:
            self.take(batch)

    def take(self, batch: Batch) -> None:
        """Write a batch, and count its requests as taken."""
        self.write(batch)
        self.taken_blocks += sum(len(each.request.chain.hashes) for each in batch.requests)
        self.taken += len(batch.requests)

    def write(self, batch: Batch) -> None:
        """Write a batch. Never raises: while the disk fails, requests are counted instead."""
        self._unrouted += batch.unrouted
        self._dropped += batch.dropped
        for _, name, pool in batch.pools:
            self._pools.pop(name, None)
            if pool is not None:
                self._pools[name] = pool
        written = 0
        if self._retry_s is None or self._clock() >= self._retry_s:
            try:
                for lines, requests in self._members(batch, self._opened()):
                    self._files.append(batch.now_s, lines)
                    written += requests
                self._recovered()
            except (OSError, RecordingError) as error:
                self._failed(str(error))
            except Exception as error:  # noqa: BLE001  # The thread must go on, whatever is wrong with one batch.
                # The error's text may quote a request.
                self._failed(f"{type(error).__name__} at {place_of(error)}")
        lost = len(batch.requests) - written
        if lost:
            self._dropped += lost
            self.metrics.dropped(lost)

    def _opened(self) -> KeyedHashes:
        """Return the hashes of the open folder; open it if it is not."""
        if self.hashes is None or not self._folder.is_open():
            secret = self._folder.open()
            self._files.begin_anew()
            self.hashes = self.hashes or KeyedHashes(secret)
        return self.hashes

    def _members(self, batch: Batch, hashes: KeyedHashes) -> Iterator[tuple[bytes, int]]:
        """Yield the lines of a batch, and how many of them are requests, in pieces of at most about a megabyte."""
        lines = [encoded(_pool_line(*each)) for each in batch.pools]
        size, requests = 0, 0
        for line in self._request_lines(batch, hashes):
            if size + len(line) > self._member_bytes and requests:
                yield b"".join(lines), requests
                lines, size, requests = [], 0, 0
            lines.append(line)
            size += len(line)
            requests += 1
        if self._unrouted or self._dropped:
            lines.append(encoded(Missing(round(batch.now_s, 6), self._unrouted, self._dropped)))
        if lines:
            yield b"".join(lines), requests
        self._unrouted = self._dropped = 0

    def _request_lines(self, batch: Batch, hashes: KeyedHashes) -> Iterator[bytes]:
        """Yield the line of each request of a batch."""
        for first in range(0, len(batch.requests), _UNINTERRUPTED):
            # The event loop gets the interpreter, which it would otherwise wait for, for up to 5 ms.
            time.sleep(0)
            yield from encoded_requests(batch.requests[first : first + _UNINTERRUPTED], hashes, batch.offset_s)

    def _head(self, now_s: float) -> bytes:
        """Return the first lines of a file that begins at ``now_s``."""
        now_s = round(now_s, 6)
        described = self._description
        header = Header(
            router=described.router,
            started_s=now_s,
            key=fingerprint(self._folder.secret or b"", self._hash_key),
            sample=described.sample,
            program=described.program,
        )
        lines: list[Line] = [header]
        lines += (PoolChanged(now_s, pool) for pool in self._pools.values())
        return b"".join(map(encoded, lines))

    def _failed(self, reason: str) -> None:
        if self._retry_s is None:
            _log.error("Recording stopped, trying again", folder=str(self._folder.path), error=reason)
        self._files.begin_anew()
        self._retry_s = self._clock() + RETRY_S
        self.metrics.set_up(is_up=False)

    def _recovered(self) -> None:
        if self._retry_s is not None:
            _log.info("Recording continues", folder=str(self._folder.path))
        self._retry_s = None
        self.metrics.set_up(is_up=True)


def _pool_line(at_s: float, name: str, pool: Pool | None) -> Line:
    return PoolRemoved(at_s, name) if pool is None else PoolChanged(at_s, pool)
