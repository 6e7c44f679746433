"""Converts files of other formats to recordings. What such a file lacks is absent from the recording.

``from_mooncake`` and ``from_openai`` read the lines. The keyed hashes come from a key that the caller makes, because
routers encrypt them with a library that simulations do not need.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

from dualmap.recordings.lines import encode_line
from dualmap.recordings.values import Header, RecordedRequest
from dualmap_sim.recordings.errors import CannotImport, UnusableLine
from dualmap_sim.recordings.lines import read_lines
from dualmap_sim.recordings.reader import Damage

IMPORT_LINE_BYTES_MAX: Final = 64 * 1024 * 1024
"""The longest line of a file to import, which is more than any router accepts as a request."""
LEFT_OUT_MAX: Final = 1000
"""The most lines that are listed as left out. Others are counted."""
ROUTER: Final = "imported"
"""The name of the router, and the namespace of the pools, of an import."""


class ImportKey(Protocol):
    """The keys of a recording's hashes. ``root_key`` is the key of the roots of prompts."""

    root_key: bytes
    fingerprint: str

    def blocks(self, hashes: Sequence[int]) -> tuple[int, ...]:
        """Return the keyed hashes of blocks."""

    def session(self, value: int) -> int:
        """Return the keyed hash of a session."""


Reader = Callable[[Mapping[str, object]], RecordedRequest]
"""Returns the request of one line. Raises UnusableLine."""


class Import:
    """The recording of the requests in the file ``path``, each of which ``read`` converts.

    ``left_out`` lists up to ``LEFT_OUT_MAX`` lines, and ``left_out_lines`` counts all; both are complete after
    ``lines``. ``program`` is the version of this program.
    """

    def __init__(self, path: Path, read: Reader, *, key: ImportKey, program: str) -> None:
        self._path = path
        self._read = read
        self._key = key
        self._program = program
        self.left_out: list[Damage] = []
        self.left_out_lines = 0

    def lines(self) -> Iterator[str]:
        """Yield the lines of the recording. Raises CannotImport if the file has no request."""
        begun = False
        for number, fields in self._objects():
            try:
                request = self._read(fields)
            except UnusableLine as error:
                self._leave_out(number, str(error))
                continue
            if not begun:
                begun = True
                yield encode_line(self._header(request.arrived_s))
            yield encode_line(request)
        if not begun:
            first = f": line {self.left_out[0].line}: {self.left_out[0].reason}" if self.left_out else ""
            raise CannotImport(f"{self._path} has no line that can be imported{first}")

    def _objects(self) -> Iterator[tuple[int, Mapping[str, object]]]:
        for number, fields in read_objects(self._path):
            if isinstance(fields, str):
                self._leave_out(number, fields)
            else:
                yield number, fields

    def _header(self, started_s: float) -> Header:
        return Header(router=ROUTER, started_s=started_s, key=self._key.fingerprint, program=self._program)

    def _leave_out(self, number: int, reason: str) -> None:
        self.left_out_lines += 1
        if len(self.left_out) < LEFT_OUT_MAX:
            self.left_out.append(Damage(str(self._path), number, reason))


def read_objects(path: Path) -> Iterator[tuple[int, Mapping[str, object] | str]]:
    """Yield the number of each line of a file, and its JSON object or why it has none. Raises CannotImport."""
    if path.exists() and not path.is_file():
        raise CannotImport(f"{path} is not a regular file; give a file with one JSON object a line")
    try:
        with path.open("rb") as file:
            for line in read_lines(file, bytes_max=IMPORT_LINE_BYTES_MAX):
                yield line.number, _object(line.text) if line.text else line.fault
    except OSError as error:
        raise CannotImport(f"{path}: {error.strerror}; give a readable file with one JSON object a line") from error


def _object(text: bytes) -> Mapping[str, object] | str:
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:
        return f"the line is no JSON object ({error})"
    return parsed if isinstance(parsed, dict) else "the line is no JSON object"


def whole_number(fields: Mapping[str, object], name: str, *, low: int) -> int:
    """Return a field with a whole number from ``low`` on. Raises UnusableLine."""
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= NUMBER_MAX:
        raise UnusableLine(name, value, f"a whole number from {low} to {NUMBER_MAX}")
    return value


NUMBER_MAX: Final = 10**9
"""The largest count of tokens in a recording."""
