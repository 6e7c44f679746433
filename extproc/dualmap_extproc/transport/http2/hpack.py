"""HPACK (RFC 7541): a decoder with its dynamic table, and constant blocks that need no table.

The encoder part has no state. Its blocks contain indexes of the static table and literals without indexing, so that
every block of a kind is equal on all connections.
"""

from collections import deque
from collections.abc import Iterable
from typing import Final, TypeAlias

from dualmap_extproc.transport.http2 import huffman

Header: TypeAlias = tuple[bytes, bytes]

# The size of the dynamic table that a peer may use without our SETTINGS_HEADER_TABLE_SIZE.
TABLE_BYTES: Final = 4096
# The size of an entry beside its name and value (RFC 7541 section 4.1).
ENTRY_BYTES: Final = 32
# The first block of a connection begins with it: the table of our encoder is empty from then on.
TABLE_SIZE_ZERO: Final = b"\x20"
# The most bytes of an integer with its prefix. Shorter encodings have every value that a block may contain.
_INTEGER_BYTES: Final = 6
_WITHOUT_VALUE: Final = (
    b"accept-language",
    b"accept-ranges",
    b"accept",
    b"access-control-allow-origin",
    b"age",
    b"allow",
    b"authorization",
    b"cache-control",
    b"content-disposition",
    b"content-encoding",
    b"content-language",
    b"content-length",
    b"content-location",
    b"content-range",
    b"content-type",
    b"cookie",
    b"date",
    b"etag",
    b"expect",
    b"expires",
    b"from",
    b"host",
    b"if-match",
    b"if-modified-since",
    b"if-none-match",
    b"if-range",
    b"if-unmodified-since",
    b"last-modified",
    b"link",
    b"location",
    b"max-forwards",
    b"proxy-authenticate",
    b"proxy-authorization",
    b"range",
    b"referer",
    b"refresh",
    b"retry-after",
    b"server",
    b"set-cookie",
    b"strict-transport-security",
    b"transfer-encoding",
    b"user-agent",
    b"vary",
    b"via",
    b"www-authenticate",
)
_STATIC: Final[tuple[Header, ...]] = (
    (b":authority", b""),
    (b":method", b"GET"),
    (b":method", b"POST"),
    (b":path", b"/"),
    (b":path", b"/index.html"),
    (b":scheme", b"http"),
    (b":scheme", b"https"),
    *((b":status", b"%d" % status) for status in (200, 204, 206, 304, 400, 404, 500)),
    (b"accept-charset", b""),
    (b"accept-encoding", b"gzip, deflate"),
    *((name, b"") for name in _WITHOUT_VALUE),
)
_NAMES: Final = {name: index for index, (name, _) in reversed(list(enumerate(_STATIC, 1)))}
_FIELDS: Final = {header: index for index, header in enumerate(_STATIC, 1)}


class HpackError(Exception):
    """The block is not valid, or its list is too large. The connection's table is lost."""


class HpackDecoder:
    """The decoder of one connection. ``list_bytes`` bounds a decoded list as RFC 9113 section 6.5.2 counts it.

    ``changes`` grows when a block changes the table. Without a change, equal blocks have equal lists.
    """

    __slots__ = ("_entries", "_list_bytes", "_size", "_size_max", "changes")

    def __init__(self, list_bytes: int) -> None:
        self._list_bytes = list_bytes
        self._entries: deque[Header] = deque()
        self._size = 0
        self._size_max = TABLE_BYTES
        self.changes = 0

    @property
    def table(self) -> tuple[Header, ...]:
        """The entries of the dynamic table, newest first."""
        return tuple(self._entries)

    @property
    def table_bytes(self) -> int:
        """The size of the dynamic table."""
        return self._size

    def decode(self, block: bytes) -> list[Header]:
        """Return the list of a whole block. Raises HpackError."""
        try:
            return self._decode(block)
        except IndexError:
            raise HpackError("truncated block") from None
        except huffman.HuffmanError as error:
            raise HpackError(str(error)) from None

    def _decode(self, block: bytes) -> list[Header]:
        out: list[Header] = []
        size = 0
        at = 0
        end = len(block)
        while at < end:
            first = block[at]
            if first & 0x80:
                index, at = (first & 0x7F, at + 1) if first != 0xFF else _integer(block, at, 0x7F)
                header = self._header(index)
            elif first & 0xE0 == 0x20:
                if out:
                    raise HpackError("table size update behind a header")
                index, at = _integer(block, at, 0x1F)
                self._resize(index)
                continue
            else:
                index, at = _integer(block, at, 0x3F if first & 0x40 else 0x0F)
                if index:
                    name = self._header(index)[0]
                else:
                    name, at = _string(block, at)
                value, at = _string(block, at)
                header = (name, value)
                if first & 0x40:
                    self._insert(header)
            size += len(header[0]) + len(header[1]) + ENTRY_BYTES
            if size > self._list_bytes:
                raise HpackError("header list too large")
            out.append(header)
        return out

    def _header(self, index: int) -> Header:
        if 0 < index <= len(_STATIC):
            return _STATIC[index - 1]
        index -= len(_STATIC) + 1
        if 0 <= index < len(self._entries):
            return self._entries[index]
        raise HpackError("index outside the tables")

    def _insert(self, header: Header) -> None:
        self.changes += 1
        self._entries.appendleft(header)
        self._size += len(header[0]) + len(header[1]) + ENTRY_BYTES
        self._evict()

    def _resize(self, size_max: int) -> None:
        if size_max > TABLE_BYTES:
            raise HpackError("table size above the setting")
        self.changes += size_max != self._size_max
        self._size_max = size_max
        self._evict()

    def _evict(self) -> None:
        while self._size > self._size_max:
            name, value = self._entries.pop()
            self._size -= len(name) + len(value) + ENTRY_BYTES


def _integer(block: bytes, at: int, mask: int) -> tuple[int, int]:
    """Return the integer in the low bits of the byte at ``at`` and the bytes after it, and the position behind it."""
    value = block[at] & mask
    at += 1
    if value < mask:
        return value, at
    for shift in range(0, 7 * (_INTEGER_BYTES - 1), 7):
        byte = block[at]
        at += 1
        value += (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise HpackError("integer too long")


def _string(block: bytes, at: int) -> tuple[bytes, int]:
    """Return the string at ``at`` and the position behind it."""
    coded = block[at] & 0x80
    length, at = _integer(block, at, 0x7F)
    end = at + length
    if end > len(block):
        raise HpackError("truncated block")
    piece = block[at:end]
    return huffman.decode(piece) if coded else piece, end


def encode(headers: Iterable[Header]) -> bytes:
    """Return a block of indexes of the static table and of literals without indexing and Huffman code."""
    out = bytearray()
    for name, value in headers:
        if index := _FIELDS.get((name, value)):
            out.append(0x80 | index)
            continue
        if index := _NAMES.get(name, 0):
            out += _encoded_integer(index, 0x0F)
        else:
            out.append(0)
            out += _encoded_integer(len(name), 0x7F) + name
        out += _encoded_integer(len(value), 0x7F) + value
    return bytes(out)


def _encoded_integer(value: int, mask: int) -> bytes:
    if value < mask:
        return bytes((value,))
    out = bytearray((mask,))
    value -= mask
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
