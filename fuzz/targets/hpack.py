"""Fuzzes the decoder of HPACK header blocks. Any client that reaches the port can send these bytes."""

from random import Random
from typing import Final

from dualmap_extproc.transport.http2 import opening
from dualmap_extproc.transport.http2.hpack import ENTRY_BYTES, TABLE_BYTES, Header, HpackDecoder, HpackError, encode
from fuzz.choices import Choices

_LIST_BYTES: Final = 2000
_NAMES: Final = (b":method", b":path", b"te", b"content-type", b"content-length", b"grpc-timeout", b"a", b"")
_VALUES: Final = (b"POST", b"/", b"trailers", b"application/grpc", b"5", b"1S", b"", b"x" * 300)
# Representations whose first byte selects what follows.
_FIRST: Final = (0x80, 0xBE, 0x40, 0x7F, 0x00, 0x0F, 0x10, 0x20, 0x3F, 0xFF)


def check(data: bytes) -> None:
    """Check that any blocks of a connection give lists within the bounds or an error, and a table within its size.

    The input is used as one block, as a series of blocks, and as choices of headers that are encoded and decoded.
    """
    _decode(HpackDecoder(_LIST_BYTES), data)
    choices = Choices(data)
    decoder, twin = HpackDecoder(_LIST_BYTES), HpackDecoder(_LIST_BYTES)
    while choices.more:
        block = choices.chunk()
        changes, table = decoder.changes, decoder.table
        headers = _decode(decoder, block)
        assert headers == _decode(twin, block)
        assert decoder.table == twin.table
        if headers is None:
            break
        if changes == decoder.changes:
            # Without a change of the table, an equal block has an equal list.
            assert decoder.table == table
            assert _decode(decoder, block) == headers
    _check_encoder(Choices(data))


def mutate(data: bytes, random: Random) -> bytes | None:
    """Insert a representation, with its length before it."""
    at = random.randrange(len(data) + 1)
    block = bytes((random.choice(_FIRST),)) + random.randbytes(random.randrange(6))
    return data[:at] + bytes((len(block),)) + block + data[at:]


def _decode(decoder: HpackDecoder, block: bytes) -> list[Header] | None:
    try:
        headers = decoder.decode(block)
    except HpackError as error:
        assert str(error)  # noqa: PT017 - the target is no test
        return None
    finally:
        assert decoder.table_bytes == sum(len(name) + len(value) + ENTRY_BYTES for name, value in decoder.table)
        assert decoder.table_bytes <= TABLE_BYTES
    assert sum(len(name) + len(value) + ENTRY_BYTES for name, value in headers) <= _LIST_BYTES
    try:
        asked = opening.read(headers, {})
        assert asked.refusal
        assert asked.timeout_s is None or asked.timeout_s >= 0
    except opening.MalformedError as error:
        assert str(error)  # noqa: PT017 - the target is no test
    return headers


def _check_encoder(choices: Choices) -> None:
    headers = []
    while choices.more and len(headers) < 20:
        headers.append((choices.pick(_NAMES) or choices.chunk(), choices.pick(_VALUES) or choices.chunk()))
    decoder = HpackDecoder(1 << 20)
    assert decoder.decode(encode(headers)) == headers
    assert decoder.changes == 0
