"""Reads HTTP/1.1 answers to GET requests, with a limit for every part whose size the server chooses.

A general HTTP client takes twice as long for each page of metrics (bench/results/profile.md). The reader
accepts the answers of RFC 9112 with a Content-Length, in chunks, or up to the connection's end.
"""

import asyncio
import re
from typing import Final, NamedTuple

HEAD_MAX_BYTES: Final = 64 * 1024
"""The largest head of an answer, and the largest line between two chunks. Also the limit of the stream's buffer."""
CHUNKS_MAX: Final = 1024
"""The most chunks of an answer."""

_STATUS: Final = re.compile(rb"HTTP/1\.([01]) ([0-9]{3})(?: [^\r\n]*)?\r\n")
_FIELD: Final = re.compile(rb"\r\n(content-length|transfer-encoding|content-encoding|connection):([^\r\n]*)", re.I)
_LENGTH: Final = re.compile(rb"[0-9]{1,15}")
_CHUNK: Final = re.compile(rb"([0-9a-fA-F]{1,12})[ \t]*(?:;[^\r\n]*)?\r\n")


class AnswerError(Exception):
    """An answer that cannot be used; the text says which and why.

    ``silent`` is true if there is no answer at all, and ``unknown`` if the server does not know the page.
    """

    def __init__(self, text: str, *, silent: bool = False, unknown: bool = False) -> None:
        super().__init__(text)
        self.silent = silent
        self.unknown = unknown


class Answer(NamedTuple):
    """The content of an answer; ``keeps_open`` is whether the connection can take another request."""

    content: bytes
    keeps_open: bool


async def read_answer(reader: asyncio.StreamReader, path: str, *, most: int) -> Answer:
    """Return the answer to a request for ``path`` if its status is 200 and it has at most ``most`` bytes.

    The reader's limit is HEAD_MAX_BYTES. Raises AnswerError for an answer that cannot be used, ValueError for one that
    is not HTTP, LimitOverrunError for a head or line that is too long, and EOFError if the connection ends early.
    """
    head = await reader.readuntil(b"\r\n\r\n")
    status = _STATUS.match(head)
    if status is None:
        raise ValueError("no valid status line")
    if status[2] != b"200":
        raise AnswerError(f"{path} was answered with {status[2].decode()}", unknown=status[2] == b"404")
    fields: dict[bytes, bytes] = {}
    for field in _FIELD.finditer(head):
        name, value = field[1].lower(), field[2].strip().lower()
        # A repeated field is a list. No list is valid for the fields that determine the length.
        fields[name] = fields[name] + b"," + value if name in fields else value
    if fields.get(b"content-encoding", b"identity") != b"identity":
        raise AnswerError(f"{path} is compressed")
    coding, length = fields.get(b"transfer-encoding"), fields.get(b"content-length")
    keeps_open = status[1] == b"1" and b"close" not in fields.get(b"connection", b"")
    if coding is not None:
        if coding != b"chunked" or length is not None:
            raise ValueError("no valid Transfer-Encoding")
        content, has_trailers = await _chunks(reader, path, most)
        return Answer(content, keeps_open and not has_trailers)
    if length is not None:
        if _LENGTH.fullmatch(length) is None:
            raise ValueError("no valid Content-Length")
        _check_size(int(length), path, most)
        return Answer(await reader.readexactly(int(length)), keeps_open)
    return Answer(await _rest(reader, path, most), keeps_open=False)


async def _chunks(reader: asyncio.StreamReader, path: str, most: int) -> tuple[bytes, bool]:
    """Return the content of all chunks, and whether trailers follow, which are not read."""
    content = bytearray()
    # Short chunks would take far more time for each byte.
    for _ in range(CHUNKS_MAX + 1):
        start = _CHUNK.fullmatch(await reader.readuntil(b"\r\n"))
        if start is None:
            raise ValueError("no valid length of a chunk")
        size = int(start[1], 16)
        if size == 0:
            return bytes(content), await reader.readuntil(b"\r\n") != b"\r\n"
        _check_size(len(content) + size, path, most)
        chunk = await reader.readexactly(size + 2)
        if not chunk.endswith(b"\r\n"):
            raise ValueError("no valid end of a chunk")
        content += memoryview(chunk)[:-2]
    raise AnswerError(f"{path} has more than {CHUNKS_MAX} chunks")


async def _rest(reader: asyncio.StreamReader, path: str, most: int) -> bytes:
    content = bytearray()
    while part := await reader.read(HEAD_MAX_BYTES):
        content += part
        _check_size(len(content), path, most)
    return bytes(content)


def _check_size(size: int, path: str, most: int) -> None:
    if size > most:
        raise AnswerError(f"{path} has more than {most} bytes")
