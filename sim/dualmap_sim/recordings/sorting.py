"""Sorts lines by time with bounded memory: lines beyond the bound wait in temporary files."""

import heapq
import struct
import tempfile
import weakref
from collections.abc import Iterator
from typing import BinaryIO, Final, NamedTuple

from dualmap_sim.recordings.errors import RecordingError

MEMORY_BYTES: Final = 128 * 1024 * 1024
_HEAD: Final = struct.Struct("<dIQI")
_LINE_OVERHEAD_BYTES: Final = 200
"""The memory of a line beside its text."""


class TimedLine(NamedTuple):
    """The line number ``line`` of the file number ``source``. Lines of one time are in order of files and lines."""

    at_s: float
    source: int
    line: int
    text: bytes


class Sorter:
    """Collects lines in any order, and yields them sorted by time. It takes about ``memory_bytes`` of memory."""

    def __init__(self, memory_bytes: int = MEMORY_BYTES) -> None:
        self._memory_bytes = memory_bytes
        self._lines: list[TimedLine] = []
        self._bytes = 0
        self._runs: list[BinaryIO] = []

    def add(self, line: TimedLine) -> None:
        """Add a line. Raises RecordingError if a temporary file cannot be written."""
        self._lines.append(line)
        self._bytes += len(line.text) + _LINE_OVERHEAD_BYTES
        if self._bytes > self._memory_bytes:
            self._spill()

    def sorted(self) -> Iterator[TimedLine]:
        """Yield all lines in order of time. A second iteration may begin when the first one has ended."""
        self._lines.sort()
        for run in self._runs:
            run.seek(0)
        return heapq.merge(self._lines, *map(_read, self._runs))

    def _spill(self) -> None:
        self._lines.sort()
        try:
            run: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115 - It is open as long as the sorter exists.
            weakref.finalize(self, run.close)
            for line in self._lines:
                run.write(_HEAD.pack(line.at_s, line.source, line.line, len(line.text)))
                run.write(line.text)
        except OSError as error:
            raise RecordingError(
                f"temporary files cannot be written: {error.strerror}; name a folder with more space in TMPDIR"
            ) from error
        self._runs.append(run)
        self._lines.clear()
        self._bytes = 0


def _read(run: BinaryIO) -> Iterator[TimedLine]:
    while head := run.read(_HEAD.size):
        at_s, source, number, length = _HEAD.unpack(head)
        yield TimedLine(at_s, source, number, run.read(length))
