"""Tests of the lines of a recording's file: members of gzip, cut-off files, damage and long lines."""

import gzip
import io
import random

from hypothesis import given
from hypothesis import strategies as st

from dualmap_sim.recordings.lines import LINE_BYTES_MAX, Line, read_lines

TEXTS = tuple(b"line %d of the file" % number for number in range(1, 8))
PLAIN = b"".join(text + b"\n" for text in TEXTS)


def read(content: bytes) -> list[Line]:
    return list(read_lines(io.BytesIO(content)))


def members(*texts: bytes) -> bytes:
    return b"".join(gzip.compress(text + b"\n", mtime=0) for text in texts)


def sound(lines: list[Line]) -> list[bytes]:
    return [line.text for line in lines if not line.fault]


def test_lines_of_plain_file_are_numbered_and_blank_lines_are_left_out() -> None:
    assert read(b"a\n\nb\n") == [Line(1, b"a"), Line(3, b"b")]


def test_lines_of_several_members_continue_across_the_members() -> None:
    content = gzip.compress(b"one\ntw") + gzip.compress(b"o\nthree\n")
    assert read(content) == [Line(1, b"one"), Line(2, b"two"), Line(3, b"three")]


def test_zero_bytes_after_a_member_are_ignored() -> None:
    assert read(members(b"a") + bytes(512)) == [Line(1, b"a")]


def test_plain_file_cut_at_every_byte_keeps_the_complete_lines() -> None:
    for length in range(len(PLAIN) + 1):
        lines = read(PLAIN[:length])
        assert sound(lines) == list(TEXTS[: PLAIN[:length].count(b"\n")])
        assert len(lines) - len(sound(lines)) == (length > 0 and not PLAIN[:length].endswith(b"\n"))


def test_compressed_file_cut_at_every_byte_keeps_the_lines_of_complete_members() -> None:
    content = members(*TEXTS)
    ends = [len(members(*TEXTS[:count])) for count in range(len(TEXTS) + 1)]
    for length in range(len(content) + 1):
        complete = sum(end <= length for end in ends) - 1
        kept = sound(read(content[:length]))
        assert kept[:complete] == list(TEXTS[:complete])
        assert len(kept) <= complete + 1


def test_flushed_member_without_its_end_has_no_fault() -> None:
    content = io.BytesIO()
    with gzip.GzipFile(fileobj=content, mode="wb") as file:
        file.write(PLAIN)
        file.flush()
        flushed = content.getvalue()
    assert read(flushed) == [Line(number, text) for number, text in enumerate(TEXTS, start=1)]


def test_damaged_member_costs_only_its_own_lines() -> None:
    noise = random.Random(1).randbytes(4000).hex().encode()
    damaged = bytearray(gzip.compress(noise + b"\n"))
    damaged[200:220] = bytes(20)
    lines = read(members(b"before") + bytes(damaged) + members(b"after"))
    assert sound(lines) == [b"before", b"after"]
    assert [line.fault for line in lines if line.fault] == ["the compressed data is damaged here"]


def test_line_that_is_too_long_is_left_out_with_its_number() -> None:
    lines = read(b"a\n" + b"x" * (LINE_BYTES_MAX + 1) + b"\nb\n")
    assert sound(lines) == [b"a", b"b"]
    assert [(line.number, line.text) for line in lines if line.fault] == [(2, b"")]
    (last,) = read(b"x" * (LINE_BYTES_MAX + 70_000))
    assert "longer than" in last.fault


def test_small_file_of_one_endless_line_stays_small() -> None:
    (line,) = read(gzip.compress(bytes(20_000_000).replace(b"\0", b"y")))
    assert line.text == b""
    assert "longer than" in line.fault


@given(st.binary(max_size=300), st.integers(0, 200), st.binary(max_size=40))
def test_lines_of_any_bytes_raise_nothing(noise: bytes, place: int, inserted: bytes) -> None:
    read(noise)
    content = members(*TEXTS)
    read(content[:place] + inserted + content[place + len(inserted) :])
