"""Processes that read large bodies, so that no body holds the event loop.

Each process reads one body at a time. One process takes the shortest waiting body next, so that small bodies pass huge
ones. The other process takes the oldest one, so that short bodies cannot keep a longer body waiting. A process that
ends or takes too long is replaced.
"""

import asyncio
import contextlib
import sys
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from dualmap.prompts.prompt import Prompt
from dualmap_edge.logs import get_logger
from dualmap_extproc.errors import Refused, invalid_body, overloaded
from dualmap_extproc.request.reading import PREFIX_BYTES, Done, LargeBody, decode_result, encode_body, lengths

# The most bodies that wait for a process.
WAITING_MAX: Final = 64
# The longest time that a body waits for a process, and the longest time of reading it. The sum stays below the time
# for which Envoy waits for an answer.
WAIT_S: Final = 5.0
READ_S: Final = 5.0
_WORKER: Final = "dualmap_extproc.reading.worker"
_PIECE_BYTES: Final = 256 * 1024
_log = get_logger(__name__)


class ReadingProcesses:
    """The processes, and the bodies that wait for them. It implements ``request.reading.Reader``."""

    def __init__(self, *, wait_s: float = WAIT_S, read_s: float = READ_S) -> None:
        self._wait_s = wait_s
        # The oldest body is first.
        self._waiting: list[_Reading] = []
        self._arrived = asyncio.Event()
        self._workers = tuple((_Worker(read_s), choose) for choose in _ORDERS)

    @property
    def pids(self) -> tuple[int, ...]:
        """The ids of the running processes."""
        return tuple(worker.process.pid for worker, _ in self._workers if worker.process is not None)

    async def run(self) -> None:
        """Read bodies until cancelled, then end the processes."""
        try:
            async with asyncio.TaskGroup() as group:
                for worker, choose in self._workers:
                    group.create_task(self._serve(worker, choose))
        finally:
            for worker, _ in self._workers:
                await worker.end()

    def read(self, large: LargeBody, done: Done) -> Callable[[], None] | None:
        """Begin to read a body; return a function that cancels it, or None if too many bodies wait."""
        if len(self._waiting) >= WAITING_MAX and not self._make_room(large.client):
            return None
        reading = _Reading(large, done)
        reading.timer = asyncio.get_running_loop().call_later(self._wait_s, self._expire, reading)
        self._waiting.append(reading)
        self._arrived.set()

        def forget() -> None:
            reading.done = None
            if reading in self._waiting:
                self._take(reading)

        return forget

    def _take(self, reading: "_Reading") -> None:
        """Remove a body from those that wait. Its timer ends, because the timer refers to the body."""
        self._waiting.remove(reading)
        if reading.timer is not None:
            reading.timer.cancel()

    def _expire(self, reading: "_Reading") -> None:
        """Refuse a body that has waited too long."""
        self._take(reading)
        _refuse(reading)

    def _make_room(self, client: str) -> bool:
        """Refuse the newest body of the client with the most; return False if ``client`` would have as many."""
        bodies = Counter(each.large.client for each in self._waiting)
        most, number = bodies.most_common(1)[0]
        if number <= bodies[client] + 1:
            return False
        newest = next(each for each in reversed(self._waiting) if each.large.client == most)
        self._take(newest)
        # Later: another stream has called.
        asyncio.get_running_loop().call_soon(_refuse, newest)
        return True

    async def _serve(self, worker: "_Worker", choose: "_Order") -> None:
        """Read one waiting body after the other, in the order of ``choose``."""
        while True:
            while not self._waiting:
                # The process is started before the first body needs it.
                await worker.start()
                self._arrived.clear()
                await self._arrived.wait()
            reading = choose(self._waiting)
            self._take(reading)
            result = await worker.read(reading.large)
            if reading.done is not None:
                reading.done(asyncio.get_running_loop().time(), result)
            del reading


class _Reading:
    """A body that waits or is being read. ``done`` is None if it was cancelled."""

    __slots__ = ("done", "large", "timer")

    def __init__(self, large: LargeBody, done: Done) -> None:
        self.large = large
        self.done: Done | None = done
        self.timer: asyncio.TimerHandle | None = None


def _refuse(reading: _Reading) -> None:
    """Answer that the router is overloaded, unless the reading was cancelled."""
    if reading.done is not None:
        reading.done(asyncio.get_running_loop().time(), overloaded())


def _shortest(waiting: Sequence[_Reading]) -> _Reading:
    return min(waiting, key=lambda each: each.large.size_bytes)


def _oldest(waiting: Sequence[_Reading]) -> _Reading:
    return waiting[0]


_Order: TypeAlias = Callable[[Sequence[_Reading]], _Reading]
"""Chooses the next of the waiting bodies, of which the oldest is first."""
# The order of each process.
_ORDERS: Final[tuple[_Order, ...]] = (_shortest, _oldest)
PROCESSES: Final = len(_ORDERS)


class _Worker:
    """One process, which is started when it is needed. ``process`` is None while it does not run."""

    def __init__(self, read_s: float) -> None:
        self._read_s = read_s
        self.process: Process | None = None

    async def start(self) -> None:
        """Start the process unless it runs; log the failure if it cannot start."""
        if self.process is not None and self.process.returncode is None:
            return
        await self.end()
        command = (sys.executable, "-P", "-m", _WORKER)
        try:
            # In a session of its own: signals for the router's process group do not reach the process.
            self.process = await asyncio.create_subprocess_exec(
                *command, stdin=PIPE, stdout=PIPE, start_new_session=True
            )
        except OSError as error:
            _log.error("Failed to start a process that reads large bodies", error=str(error))

    async def read(self, large: LargeBody) -> Prompt | Refused:
        """Return what the process makes of a body. A process that has ended is replaced, once for a body."""
        for _ in range(2):
            await self.start()
            if self.process is None:
                break
            try:
                async with asyncio.timeout(self._read_s):
                    return await _exchange(self.process, large)
            except TimeoutError:
                _log.warning("Replaced a reading process that exceeded its time limit", bytes=large.size_bytes)
                await self.end()
                return invalid_body("the body takes too long to read")
            except (OSError, asyncio.IncompleteReadError):
                _log.warning("Replaced a reading process that exited while reading a body", bytes=large.size_bytes)
                await self.end()
        return overloaded()

    async def end(self) -> None:
        """End the process."""
        process, self.process = self.process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        if process.stdin is not None:
            process.stdin.close()
        if process.stdout is not None:
            # The event loop does not read all of a long result that is not used. Without the pipe's end, ``wait`` would
            # not return.
            with contextlib.suppress(OSError):
                await process.stdout.read()
        await process.wait()


async def _exchange(process: Process, large: LargeBody) -> Prompt | Refused:
    """Send a body to a process and return the result. Raises OSError or IncompleteReadError if the process ends."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(encode_body(large))
    for chunk in large.chunks:
        view = memoryview(chunk)
        # In pieces: the transport copies what the pipe does not take at once.
        for start in range(0, len(view), _PIECE_BYTES):
            process.stdin.write(view[start : start + _PIECE_BYTES])
            await process.stdin.drain()
    header, payload = lengths(await process.stdout.readexactly(PREFIX_BYTES))
    return decode_result(await process.stdout.readexactly(header), await process.stdout.readexactly(payload))
