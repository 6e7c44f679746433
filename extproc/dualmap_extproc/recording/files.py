"""The files of a recording: each is a series of gzip members. The files' total size is bounded; the oldest go first."""

import os
import re
import zlib
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

FILE_BYTES: Final = 64 * 10**6
"""The size from which on a new file begins; less if the whole recording has a small bound."""
FILES: Final = 8
"""A recording at its bound consists of at least this many files, so that little is lost with the oldest."""
_NAME: Final = re.compile(r"requests-\d{8}T\d{6}Z-\d{4}\.jsonl\.gz", re.ASCII)
# The fastest level: others take more time and save a twentieth, because hashes are random.
_LEVEL: Final = 1
_GZIP: Final = 31
# The key is in the same folder, and its size belongs to the folder's.
_KEY_BYTES: Final = 100


class RecordingFiles:
    """The files in ``folder``, of at most ``max_bytes`` together. Each begins with the lines that ``head`` returns."""

    def __init__(self, folder: Path, max_bytes: int, head: Callable[[float], bytes]) -> None:
        self._folder = folder
        self._max_bytes = max_bytes - _KEY_BYTES
        self.file_bytes = min(FILE_BYTES, max_bytes // FILES)
        self._head = head
        self._name = ""
        self._sizes: dict[str, int] = {}

    def begin_anew(self) -> None:
        """Let the next lines begin a new file."""
        self._name = ""

    def append(self, now_s: float, lines: bytes) -> None:
        """Write whole lines at ``now_s``, seconds since the epoch. If it raises OSError, no part of them is written."""
        member = _compressed(lines)
        if not self._name or self._sizes[self._name] + len(member) > self.file_bytes:
            self._sizes = _sizes(self._folder)
            self._name = ""
            member = _compressed(self._head(now_s)) + member
        self._make_room(len(member))
        if not self._name:
            name = self._new_name(now_s)
            self._sizes[name] = 0
            self._name = name
        size = self._sizes[self._name]
        try:
            _append(self._folder / self._name, member, size)
        except OSError:
            self._name = ""
            raise
        self._sizes[self._name] = size + len(member)

    def _make_room(self, size: int) -> None:
        for name in sorted(self._sizes):
            if sum(self._sizes.values()) + size <= self._max_bytes:
                break
            if name != self._name:
                with suppress(FileNotFoundError):
                    (self._folder / name).unlink()
                del self._sizes[name]

    def _new_name(self, now_s: float) -> str:
        time = datetime.fromtimestamp(now_s, UTC).strftime("%Y%m%dT%H%M%SZ")
        names = (f"requests-{time}-{number:04}.jsonl.gz" for number in range(10_000))
        return next(name for name in names if name not in self._sizes)


def _compressed(lines: bytes) -> bytes:
    return zlib.compress(lines, _LEVEL, wbits=_GZIP)


def _sizes(folder: Path) -> dict[str, int]:
    """Return the sizes of the recording's files, by their names."""
    with os.scandir(folder) as found:
        return {each.name: each.stat().st_size for each in found if _NAME.fullmatch(each.name)}


def _append(file: Path, member: bytes, size: int) -> None:
    """Append a member to a file of ``size`` bytes; leave the file as it was if that fails."""
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | (0 if size else os.O_CREAT | os.O_EXCL), 0o644)
    try:
        rest = memoryview(member)
        try:
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        except OSError:
            with suppress(OSError):
                os.ftruncate(descriptor, size)
            if not size:
                with suppress(OSError):
                    file.unlink()
            raise
    finally:
        os.close(descriptor)
