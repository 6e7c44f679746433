"""Differential tests of the HPACK decoder against the library hpack: equal lists, refusals and tables."""

from random import Random

import hpack
import pytest

from dualmap_extproc.transport.http2 import huffman
from dualmap_extproc.transport.http2.hpack import Header, HpackDecoder, HpackError, encode

LIST_BYTES = 16_384
LISTS = 20_000
MUTATED_BLOCKS = 30_000
# Each seed has an equal part of them.
SEEDS = 4
NAMES = (b":path", b":method", b"x-request-id", b"te", b"cookie", b"a", b"", b"content-type", b"x" * 60)
INSERTED = (b"\x20", b"\x3f\xe1\x1f", b"\xff\x80\x80\x01", b"\x7f\x00", b"\x00", b"\xbe")
# RFC 7541 appendix C.4 and C.6: blocks of one connection with Huffman code, and the table after each.
C4 = (
    ("828684418cf1e3c2e5f23a6ba0ab90f4ff", [(b":authority", b"www.example.com")]),
    ("828684be5886a8eb10649cbf", [(b"cache-control", b"no-cache"), (b":authority", b"www.example.com")]),
    (
        "828785bf408825a849e95ba97d7f8925a849e95bb8e8b4bf",
        [(b"custom-key", b"custom-value"), (b"cache-control", b"no-cache"), (b":authority", b"www.example.com")],
    ),
)


def value(random: Random) -> bytes:
    kind = random.random()
    if kind < 0.1:
        return random.randbytes(random.randrange(40))
    return bytes(random.choices(b"abcdef0123456789-/%: ", k=random.choice((0, 1, 5, 20, 90, 400))))


def library() -> hpack.Decoder:
    return hpack.Decoder(max_header_list_size=LIST_BYTES)


def outcome(decoder: hpack.Decoder, block: bytes) -> list[Header] | None:
    try:
        return [tuple(each) for each in decoder.decode(block, raw=True)]
    except hpack.HPACKError:
        return None


def own_outcome(decoder: HpackDecoder, block: bytes) -> list[Header] | None:
    try:
        return decoder.decode(block)
    except HpackError:
        return None


def assert_equal_tables(own: HpackDecoder, other: hpack.Decoder) -> None:
    table = other.header_table
    assert own.table == tuple(table.dynamic_entries)
    assert own.table_bytes == table._current_size


@pytest.mark.parametrize("seed", range(SEEDS))
def test_decoder_agrees_with_the_library_on_random_lists(seed: int) -> None:
    random = Random(seed)
    encoder, own, other = hpack.Encoder(), HpackDecoder(LIST_BYTES), library()
    for _ in range(LISTS // SEEDS):
        if random.random() < 0.02:
            encoder.header_table_size = random.choice((0, 60, 500, 4096))
        headers = [(random.choice(NAMES), value(random)) for _ in range(random.randrange(6))]
        if random.random() < 0.5:
            headers = [(random.choice(NAMES), random.choice((b"1", b"two", b"POST", b"/"))) for _ in headers]
        # Every third header is never indexed.
        sensitive = [hpack.NeverIndexedHeaderTuple(*each) if at % 3 == 2 else each for at, each in enumerate(headers)]
        block = encoder.encode(sensitive, huffman=random.random() < 0.7)
        assert own_outcome(own, block) == outcome(other, block) == headers
        assert_equal_tables(own, other)


def mutated(random: Random, block: bytes) -> bytes:
    changed = bytearray(block)
    for _ in range(random.randrange(1, 4)):
        at = random.randrange(len(changed) + 1)
        kind = random.randrange(4)
        if kind == 0 and at < len(changed):
            changed[at] = random.randrange(256)
        elif kind == 1 and at < len(changed):
            changed[at] ^= 1 << random.randrange(8)
        elif kind == 2:
            changed[at:at] = random.choice(
                (b"\x20", b"\x3f\xe1\x1f", b"\xff\x80\x80\x01", b"\x7f\x00", b"\x00", b"\xbe")
            )
        else:
            del changed[at : at + random.randrange(1, 4)]
    return bytes(changed)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_decoder_agrees_with_the_library_on_mutated_blocks(seed: int) -> None:
    random = Random(100 + seed)
    refused = 0
    encoder, own, other = hpack.Encoder(), HpackDecoder(LIST_BYTES), library()
    for _ in range(MUTATED_BLOCKS // SEEDS):
        headers = [(random.choice(NAMES), value(random)) for _ in range(random.randrange(1, 5))]
        block = mutated(random, encoder.encode(headers, huffman=random.random() < 0.7))
        result = own_outcome(own, block)
        assert result == outcome(other, block), block.hex()
        assert_equal_tables(own, other)
        if result is None:
            # A refused block ends the connection, and the tables begin anew.
            refused += 1
            encoder, own, other = hpack.Encoder(), HpackDecoder(LIST_BYTES), library()
    assert 1000 < refused < MUTATED_BLOCKS // SEEDS - 1000


def test_decoder_reads_the_examples_of_the_rfc() -> None:
    decoder = HpackDecoder(LIST_BYTES)
    for block, table in C4:
        decoder.decode(bytes.fromhex(block))
        assert list(decoder.table) == table


def test_huffman_code_of_every_byte_agrees_with_the_library() -> None:
    encoder = hpack.huffman.HuffmanEncoder(
        hpack.huffman_constants.REQUEST_CODES, hpack.huffman_constants.REQUEST_CODES_LENGTH
    )
    for byte in range(256):
        for around in (b"", b"ab", bytes(range(256))):
            string = around + bytes((byte,)) + around
            assert huffman.decode(encoder.encode(string)) == string


@pytest.mark.parametrize("coded", [b"\xff\xff\xff\xff", b"\x00", b"\xff", b"\x06", b"\x07\xff"])
def test_huffman_string_with_eos_or_wrong_padding_is_refused(coded: bytes) -> None:
    with pytest.raises(huffman.HuffmanError):
        huffman.decode(coded)


@pytest.mark.parametrize(
    "block",
    [
        b"\x80",
        b"\xbe",
        b"\xff",
        b"\xff\x80\x80\x80\x80\x80\x01",
        b"\x82\x20",
        b"\x3f\xe2\x1f",
        b"\x40",
        b"\x40\x05ab",
        b"\x00\x01a",
        b"\x00\x01a\xff\xff",
    ],
)
def test_invalid_block_is_refused(block: bytes) -> None:
    with pytest.raises(HpackError):
        HpackDecoder(LIST_BYTES).decode(block)


def test_list_above_the_limit_is_refused_while_it_is_decoded() -> None:
    decoder = HpackDecoder(1000)
    # One entry of 500 bytes, then one byte for each further copy.
    bomb = b"\x40\x01a\x7f\xf4\x02" + b"b" * 467 + b"\xbe" * 10_000
    with pytest.raises(HpackError, match="too large"):
        decoder.decode(bomb)


def test_changes_of_the_table_are_counted() -> None:
    decoder = HpackDecoder(LIST_BYTES)
    decoder.decode(b"\x82\x00\x01a\x01b")
    assert decoder.changes == 0
    decoder.decode(b"\x40\x01a\x01b")
    assert decoder.changes == 1
    decoder.decode(b"\x20\x82")
    assert (decoder.changes, decoder.table) == (2, ())
    decoder.decode(b"\x20\x82")
    assert decoder.changes == 2


def test_own_blocks_are_read_by_the_library() -> None:
    headers = [
        (b":status", b"200"),
        (b"content-type", b"application/grpc"),
        (b"grpc-message", b"x" * 1024),
        (b"b", b""),
    ]
    decoder = library()
    assert outcome(decoder, b"\x20" + encode(headers)) == headers
    assert decoder.header_table_size == 0
    assert not decoder.header_table.dynamic_entries
