"""Reads what a router recorded in a folder, for tests."""

import gzip
import zlib
from pathlib import Path

from dualmap.recordings.lines import decode_line
from dualmap.recordings.values import Line, RecordedRequest


def files_of(folder: Path) -> list[Path]:
    """Return the files of a recording, oldest first."""
    return sorted(folder.glob("requests-*.jsonl.gz"))


def text_of(file: Path) -> str:
    """Return the text of a file up to its last complete gzip member, as any reader does while the router writes."""
    text, data = b"", file.read_bytes()
    while data:
        member = zlib.decompressobj(31)
        part = member.decompress(data)
        if not member.eof:
            break
        text, data = text + part, member.unused_data
    return text.decode("ascii")


def lines_of(folder: Path) -> list[Line]:
    """Return all lines of a recording."""
    return [decode_line(line) for file in files_of(folder) for line in text_of(file).splitlines()]


def requests_of(folder: Path) -> list[RecordedRequest]:
    """Return the requests of a recording, in the order of their arrivals."""
    found = [line for line in lines_of(folder) if isinstance(line, RecordedRequest)]
    return sorted(found, key=lambda request: request.arrived_s)


def everything_in(folder: Path) -> bytes:
    """Return all bytes of a recording's files, decompressed, and those of the other files of its folder."""
    packed = files_of(folder)
    rest = [each.read_bytes() for each in folder.iterdir() if each not in packed and each.name != "key"]
    return b"".join([*(gzip.decompress(each.read_bytes()) for each in packed), *rest])
