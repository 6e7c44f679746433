"""Reads the lines of a file, plain or compressed, as far as they are sound.

A compressed file consists of gzip members. The last member may have no end, because its writer still writes or has been
stopped. A damaged member costs its own remaining lines only: the next member is read.
"""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Final

LINE_BYTES_MAX: Final = 4 * 1024 * 1024
"""The longest line that is read. A request with the most blocks that a router hashes needs a tenth of it."""
_CHUNK_BYTES: Final = 64 * 1024
_GZIP_START: Final = b"\x1f\x8b\x08"
_GZIP_WINDOW: Final = 16 + zlib.MAX_WBITS


@dataclass(frozen=True, slots=True)
class Line:
    """A line without its line break. ``fault`` says why the line is not complete; it is empty for a complete line."""

    number: int
    text: bytes
    fault: str = ""


@dataclass(frozen=True, slots=True)
class _Gap:
    """The bytes before this point do not continue after it."""

    reason: str


def read_lines(file: BinaryIO, *, bytes_max: int = LINE_BYTES_MAX) -> Iterator[Line]:
    """Yield the lines of a file from its current position, with numbers from 1. Blank lines count, and are left out.

    A last line without a line break has a fault and its text, which may be complete. Raises OSError if the file cannot
    be read.
    """
    number, kept = 1, bytearray()
    overlong = False
    for piece in _pieces(file):
        if isinstance(piece, _Gap):
            yield Line(number, bytes(kept), piece.reason)
            number, overlong = number + 1, False
            kept.clear()
            continue
        start = 0
        while (end := piece.find(b"\n", start)) >= 0:
            kept += piece[start:end]
            if overlong or len(kept) > bytes_max:
                yield Line(number, b"", f"the line is longer than {bytes_max} bytes")
            elif kept.strip():
                yield Line(number, bytes(kept))
            number, start, overlong = number + 1, end + 1, False
            kept.clear()
        kept += piece[start:]
        if len(kept) > bytes_max:
            overlong = True
            kept.clear()
    if overlong:
        yield Line(number, b"", f"the line is longer than {bytes_max} bytes")
    elif kept.strip():
        yield Line(number, bytes(kept), "the file ends within this line")


def _pieces(file: BinaryIO) -> Iterator[bytes | _Gap]:
    first = file.read(_CHUNK_BYTES)
    if not first.startswith(_GZIP_START[:2]):
        while first:
            yield first
            first = file.read(_CHUNK_BYTES)
        return
    yield from _inflated(first, file)


def _inflated(piece: bytes, file: BinaryIO) -> Iterator[bytes | _Gap]:
    """Yield the content of gzip members, of which ``piece`` has the first bytes, in pieces of bounded length."""
    member = zlib.decompressobj(_GZIP_WINDOW)
    while piece:
        try:
            content = member.decompress(piece, _CHUNK_BYTES)
            rest = member.unconsumed_tail
        except zlib.error:
            yield _Gap("the compressed data is damaged here")
            member = zlib.decompressobj(_GZIP_WINDOW)
            piece = _next_member(piece[1:], file)
            continue
        if content:
            yield content
        if member.eof:
            # The bytes after a member begin the next one. Some tools fill up a file with zero bytes.
            rest = member.unused_data.lstrip(b"\0")
            member = zlib.decompressobj(_GZIP_WINDOW)
        piece = rest or file.read(_CHUNK_BYTES)
    yield member.flush()


def _next_member(piece: bytes, file: BinaryIO) -> bytes:
    """Return the next bytes of a file from the start of a gzip member on; empty if there is none."""
    while (start := piece.find(_GZIP_START)) < 0:
        more = file.read(_CHUNK_BYTES)
        if not more:
            return b""
        piece = piece[-len(_GZIP_START) + 1 :] + more
    return piece[start:]
