"""Reads recordings from files: folders of routers, single files and merged files, compressed or plain.

The lines of a file are in order of the requests' ends, and a reading yields them in order of arrival. Damaged lines are
left out and listed. A router may write to a folder while it is read.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from os import fstat
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import BinaryIO, Final, TypeAlias

from dualmap.recordings.errors import DamagedLine, ForeignVersion, InvalidLine
from dualmap.recordings.lines import decode_line
from dualmap.recordings.values import Header, Missing, PoolChanged, PoolRemoved, RecordedRequest
from dualmap_sim.recordings.errors import NotARecording
from dualmap_sim.recordings.lines import read_lines
from dualmap_sim.recordings.sorting import Sorter, TimedLine

ACCEPTED: Final = "give the folder of `dualmap router --record`, one of its files, or a file of `dualmap trace merge`"
DAMAGED_MAX: Final = 1000
"""The most damaged lines that are listed. Others are counted."""
NAMES: Final = ","
"""Separates the names in the first line of a merged file."""
_SUFFIXES: Final = (".jsonl", ".jsonl.gz")
_LISTINGS_MAX: Final = 3
"""A folder is listed again for files that a router has begun or renamed meanwhile."""
_TIME: Final = re.compile(rb'\{"kind":"[a-z_]+","(?:arrived|at)_s":([0-9]{1,11}(?:\.[0-9]{1,9})?),')
"""The beginning of a line as routers write it. Other lines are parsed for their time."""

Event: TypeAlias = RecordedRequest | PoolChanged | PoolRemoved | Missing
"""A line of a recording behind the first line of its file."""


@dataclass(frozen=True, slots=True, order=True)
class Damage:
    """A line that was left out, with the reason."""

    file: str
    line: int
    reason: str


@dataclass(frozen=True, slots=True)
class Source:
    """A file of a recording, and its first line."""

    file: str
    header: Header

    @property
    def keys(self) -> frozenset[str]:
        """The fingerprints of the keys of its hashes. A merged file may have several."""
        return frozenset(self.header.key.split(NAMES))


class Reading:
    """One pass over the lines of recordings at ``paths``. Raises NotARecording if a path has none.

    ``sources`` are the files with their first lines. ``damaged`` lists up to ``DAMAGED_MAX`` lines that are left out,
    and ``damaged_lines`` counts all; both are complete after ``events``. A file that is given twice counts once.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.sources: list[Source] = []
        self.damaged_lines = 0
        self._damaged: list[Damage] = []
        self._seen: set[tuple[int, int]] = set()
        self._sorter = Sorter()
        self._complete = False
        for path in paths:
            self._read_path(path)

    @property
    def damaged(self) -> tuple[Damage, ...]:
        """The lines that were left out, in order of files and lines."""
        return tuple(sorted(self._damaged))

    def events(self) -> Iterator[Event]:
        """Yield the sound lines in order of time: arrivals of requests, and changes of pools.

        A second iteration may begin when the first one has ended, and yields the same lines.
        """
        return (event for _, event in self.lines())

    def lines(self) -> Iterator[tuple[bytes, Event]]:
        """Do the same as ``events``, and yield each line's text, too."""
        for timed in _distinct(self._sorter.sorted()):
            try:
                event = decode_line(timed.text.decode())
            except (DamagedLine, UnicodeDecodeError) as error:
                if not self._complete:
                    self._leave_out(self.sources[timed.source].file, timed.line, _reason(error))
                continue
            if not isinstance(event, Header):
                yield timed.text, event
        self._complete = True

    def requests(self) -> Iterator[RecordedRequest]:
        """Yield the requests in order of arrival."""
        return (event for event in self.events() if isinstance(event, RecordedRequest))

    @property
    def keys(self) -> frozenset[str]:
        """The fingerprints of all keys. Hashes of different keys cannot be compared."""
        return frozenset().union(*(source.keys for source in self.sources))

    @property
    def samples(self) -> Sequence[float]:
        """The distinct shares of sessions that the files record, in increasing order."""
        return sorted({source.header.sample for source in self.sources})

    @property
    def routers(self) -> Sequence[str]:
        """The names of the routers that wrote the files, in alphabetical order."""
        return sorted({name for source in self.sources for name in source.header.router.split(NAMES)})

    def _read_path(self, path: Path) -> None:
        try:
            mode = path.stat().st_mode
            if S_ISDIR(mode):
                self._read_folder(path)
            elif S_ISREG(mode):
                self._read_only_file(path)
            else:
                raise NotARecording(f"{path} is neither a folder nor a file; {ACCEPTED}")
        except OSError as error:
            raise NotARecording(f"{path}: {error.strerror}; {ACCEPTED}") from error

    def _read_only_file(self, path: Path) -> None:
        try:
            with path.open("rb") as file:
                self._read_file(file, str(path))
        except DamagedLine as error:
            raise NotARecording(f"{path}: line 1: {error}; {ACCEPTED}") from error

    def _read_folder(self, folder: Path) -> None:
        """Read all files of a folder that begin with the first line of a recording."""
        found, tried = False, set[Path]()
        for _ in range(_LISTINGS_MAX):
            fresh = [path for path in sorted(folder.iterdir()) if path not in tried and path.is_file()]
            tried.update(fresh)
            for path in fresh:
                found = self._read_file_of_folder(path) or found
        if not found:
            what = "no file begins as a file of a recording" if tried else "the folder is empty"
            raise NotARecording(f"{folder}: {what}; {ACCEPTED}")

    def _read_file_of_folder(self, path: Path) -> bool:
        """Read a file of a folder; return whether it belongs to a recording. Files with other names are ignored."""
        try:
            with path.open("rb") as file:
                self._read_file(file, str(path))
        except FileNotFoundError:
            # A router removes its oldest files, so that the folder stays below --record-max.
            pass
        except ForeignVersion as error:
            self._leave_out(str(path), 1, str(error))
        except (DamagedLine, OSError) as error:
            if path.name.endswith(_SUFFIXES):
                self._leave_out(str(path), 1, _reason(error))
            return False
        return True

    def _read_file(self, file: BinaryIO, name: str) -> None:
        """Collect the lines of a file. Raises DamagedLine if its first line is not the first line of a recording."""
        status = fstat(file.fileno())
        identity = status.st_dev, status.st_ino
        if identity in self._seen:
            return
        self._seen.add(identity)
        lines = read_lines(file)
        first = next(lines, None)
        if first is None:
            raise InvalidLine("the file is empty")
        header = decode_line(first.text.decode("utf-8", "replace"))
        if not isinstance(header, Header) or first.number != 1:
            raise InvalidLine("the first line is not the first line of a recording")
        self.sources.append(Source(name, header))
        for line in lines:
            try:
                found = _time_or_header(line.text)
            except ForeignVersion as error:
                self._leave_out(name, line.number, f"{error}; the lines after it are left out, too")
                return
            except (DamagedLine, UnicodeDecodeError) as error:
                self._leave_out(name, line.number, line.fault or _reason(error))
                continue
            if isinstance(found, Header):
                # A file that joins files of several routers has the first line of each.
                self.sources.append(Source(name, found))
            else:
                self._sorter.add(TimedLine(found, len(self.sources) - 1, line.number, line.text))

    def _leave_out(self, file: str, line: int, reason: str) -> None:
        self.damaged_lines += 1
        if len(self._damaged) < DAMAGED_MAX:
            self._damaged.append(Damage(file, line, reason))


def _time_or_header(text: bytes) -> float | Header:
    """Return the time of a line, or a header. Raises DamagedLine or UnicodeDecodeError, but not for all damage."""
    match = _TIME.match(text)
    if match is not None:
        return float(match[1])
    value = decode_line(text.decode())
    match value:
        case RecordedRequest():
            return value.arrived_s
        case Header():
            return value
        case _:
            return value.at_s


def _distinct(lines: Iterable[TimedLine]) -> Iterator[TimedLine]:
    """Yield the lines without those that another file also has, such as a merged file and one of its sources."""
    for _, same_time in groupby(lines, key=attrgetter("at_s")):
        group = tuple(same_time)
        if len(group) == 1:
            yield group[0]
            continue
        counts: Counter[tuple[bytes, int]] = Counter()
        kept: Counter[bytes] = Counter()
        for line in group:
            counts[line.text, line.source] += 1
            if counts[line.text, line.source] > kept[line.text]:
                kept[line.text] += 1
                yield line


def _reason(error: Exception) -> str:
    match error:
        case OSError():
            return f"the file cannot be read: {error.strerror}"
        case UnicodeDecodeError():
            return "the line is not UTF-8 text"
        case _:
            return str(error)
