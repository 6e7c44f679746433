"""Tests of reading recordings: order, damage, foreign files, and folders to which a router writes."""

import gzip
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualmap.recordings.values import Missing, RecordedRequest
from dualmap_sim.recordings.errors import NotARecording
from dualmap_sim.recordings.reader import DAMAGED_MAX, Damage, Reading
from dualmap_sim.recordings.sorting import Sorter, TimedLine
from recorded import CHANGED, HEADER, START_S, request, text, write

REQUESTS = tuple(request(after_s=number, blocks=(number, 100 + number)) for number in range(4))
SHORT = tuple(each._replace(blocks=(), prompt_tokens=0, receipt=None) for each in REQUESTS[:2])


def read(*paths: Path) -> tuple[list[RecordedRequest], tuple[Damage, ...]]:
    reading = Reading(paths)
    requests = list(reading.requests())
    return requests, reading.damaged


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a"])
def test_file_yields_requests_in_order_of_arrival(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, CHANGED, *reversed(REQUESTS))
    assert read(path) == (list(REQUESTS), ())


def test_folder_yields_the_requests_of_all_its_files_in_order(tmp_path: Path) -> None:
    write(tmp_path / "1.jsonl.gz", REQUESTS[2], REQUESTS[0])
    write(tmp_path / "2.jsonl", REQUESTS[3], REQUESTS[1])
    (tmp_path / "key").write_bytes(os.urandom(32))
    (tmp_path / "lost+found").mkdir()
    assert read(tmp_path) == (list(REQUESTS), ())


def test_more_lines_than_memory_are_sorted_in_temporary_files() -> None:
    sorter = Sorter(memory_bytes=1000)
    lines = [TimedLine(float(number * 37 % 101), 0, number, b"x" * number) for number in range(101)]
    for line in lines:
        sorter.add(line)
    assert list(sorter.sorted()) == sorted(lines)
    assert list(sorter.sorted()) == sorted(lines)


def test_file_given_in_several_ways_counts_once(tmp_path: Path) -> None:
    path = write(tmp_path / "a" / "1.jsonl", *REQUESTS)
    (tmp_path / "link").symlink_to(path)
    (tmp_path / "hard").hardlink_to(path)
    copy = tmp_path / "copy.gz"
    copy.write_bytes(gzip.compress(path.read_bytes()))
    assert read(path, path, tmp_path / "a", tmp_path / "link", tmp_path / "hard", copy) == (list(REQUESTS), ())


def test_equal_requests_of_one_file_all_count(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", REQUESTS[0], REQUESTS[0], REQUESTS[1])
    other = write(tmp_path / "b.jsonl", REQUESTS[0], REQUESTS[1], REQUESTS[1])
    assert len(read(path)[0]) == 3
    assert len(read(path, other)[0]) == 4


def test_damaged_lines_are_left_out_and_listed_with_their_numbers(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", REQUESTS[0])
    with path.open("ab") as file:
        file.write(b"not JSON\n" + b"\xff\xfe\n" + b"{}\n" + text(REQUESTS[1]))
        file.write(text(REQUESTS[2]).replace(b'"ok"', b'"fine"') + text(REQUESTS[3])[:-30])
    requests, damaged = read(path)
    assert requests == [REQUESTS[0], REQUESTS[1]]
    assert [(each.file, each.line) for each in damaged] == [(str(path), number) for number in (3, 4, 5, 7, 8)]
    reasons = [each.reason for each in damaged]
    expected = ("no JSON", "UTF-8", "kind", "outcome: 'fine' is not accepted", "cut off")
    assert all(words in reason for words, reason in zip(expected, reasons, strict=True)), reasons


def test_second_iteration_yields_the_same_and_lists_damage_once(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", REQUESTS[0])
    with path.open("ab") as file:
        file.write(text(REQUESTS[1])[:-9] + b"\n")
    reading = Reading([path])
    assert list(reading.events()) == list(reading.events()) == [REQUESTS[0]]
    assert reading.damaged_lines == len(reading.damaged) == 1


def test_file_with_many_damaged_lines_lists_some_and_counts_all(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", REQUESTS[0])
    with path.open("ab") as file:
        file.write(b"x\n" * (DAMAGED_MAX + 7))
    reading = Reading([path])
    assert len(list(reading.events())) == 1
    assert (len(reading.damaged), reading.damaged_lines) == (DAMAGED_MAX, DAMAGED_MAX + 7)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_file_cut_at_every_byte_keeps_the_sound_lines(tmp_path: Path, name: str) -> None:
    content = write(tmp_path / name, *SHORT).read_bytes()
    ends = [len(write(tmp_path / name, *SHORT[:count]).read_bytes()) for count in range(len(SHORT) + 1)]
    path = tmp_path / name
    for length in range(len(content) + 1):
        path.write_bytes(content[:length])
        complete = sum(end <= length for end in ends) - 1
        try:
            requests, damaged = read(path)
        except NotARecording:
            # The first line may be complete when its member is not.
            assert complete < 0
            continue
        assert requests[: max(0, complete)] == list(SHORT[: max(0, complete)])
        assert len(requests) <= complete + 1
        assert len(damaged) <= 1


@settings(max_examples=100)
@given(data=st.data())
def test_file_with_any_bytes_replaced_raises_only_named_errors(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.getbasetemp()
    content = bytearray(write(folder / "noise.jsonl.gz", CHANGED, *REQUESTS).read_bytes())
    if data.draw(st.booleans()):
        content = bytearray(gzip.decompress(bytes(content)))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(content) - 1))
        content[place : place + data.draw(st.integers(0, 8))] = data.draw(st.binary(max_size=8))
    path = folder / "noise"
    path.write_bytes(content)
    try:
        requests, _ = read(path)
    except NotARecording:
        return
    assert len(requests) <= len(REQUESTS) + 1


def test_file_of_foreign_version_is_damaged_in_a_folder_and_refused_alone(tmp_path: Path) -> None:
    foreign = tmp_path / "2.jsonl"
    foreign.write_text(json.dumps({"kind": "recording", "version": 99, "layout": "new"}) + '\n{"kind":"new"}\n')
    write(tmp_path / "1.jsonl", *REQUESTS)
    requests, damaged = read(tmp_path)
    assert requests == list(REQUESTS)
    (each,) = damaged
    assert (each.file, each.line) == (str(foreign), 1)
    assert "version 99" in each.reason
    with pytest.raises(NotARecording, match=r"line 1: .*version 99.*give the folder of `dualmap router --record`"):
        Reading([foreign])


def test_joined_files_are_read_until_a_foreign_version(tmp_path: Path) -> None:
    other = HEADER._replace(key="00bb")
    foreign = text(HEADER).replace(b'"version":1', b'"version":99')
    joined = tmp_path / "joined.jsonl"
    joined.write_bytes(text(HEADER, REQUESTS[0], other, REQUESTS[1]) + foreign + text(REQUESTS[2]))
    reading = Reading([joined])
    assert list(reading.requests()) == [REQUESTS[0], REQUESTS[1]]
    assert reading.keys == {"00aa", "00bb"}
    (damage,) = reading.damaged
    assert damage.line == 5
    assert "version 99" in damage.reason
    assert damage.reason.endswith("the lines after it are left out, too")


def test_file_of_a_folder_with_a_damaged_first_line_is_damaged(tmp_path: Path) -> None:
    write(tmp_path / "1.jsonl", *REQUESTS)
    broken = write(tmp_path / "2.jsonl", request(9))
    broken.write_bytes(broken.read_bytes()[5:])
    requests, damaged = read(tmp_path)
    assert requests == list(REQUESTS)
    assert [(each.file, each.line) for each in damaged] == [(str(broken), 1)]


def test_paths_without_a_recording_are_refused(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "trace.jsonl").write_text('{"timestamp": 0, "input_length": 5, "output_length": 5, "hash_ids": [0]}\n')
    (foreign / "image.png").write_bytes(b"\x89PNG\r\n")
    empty = tmp_path / "empty"
    empty.mkdir()
    for path in (
        empty,
        foreign,
        foreign / "trace.jsonl",
        foreign / "image.png",
        tmp_path / "missing",
        Path("/dev/null"),
    ):
        with pytest.raises(NotARecording, match="give the folder of `dualmap router --record`"):
            Reading([path])


def test_files_that_vanish_or_are_renamed_meanwhile_are_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, each in enumerate(REQUESTS):
        write(tmp_path / f"{number}.jsonl", each)
    list_files = Path.iterdir

    def list_before_rotation(folder: Path) -> Iterator[Path]:
        listed = list(list_files(folder))
        if (folder / "1.jsonl").exists():
            (folder / "1.jsonl").unlink()
            (folder / "2.jsonl").rename(folder / "9.jsonl")
            write(folder / "5.jsonl", request(8))
        return iter(listed)

    monkeypatch.setattr(Path, "iterdir", list_before_rotation)
    requests, damaged = read(tmp_path)
    assert requests == [REQUESTS[0], REQUESTS[2], REQUESTS[3], request(8)]
    assert damaged == ()


def test_reading_knows_the_files_and_what_the_recording_lacks(tmp_path: Path) -> None:
    write(tmp_path / "1.jsonl", CHANGED, Missing(at_s=START_S + 1, unrouted=3))
    write(tmp_path / "2.jsonl", header=HEADER._replace(router="router-b", sample=0.5, key="00bb"))
    reading = Reading([tmp_path])
    assert list(reading.events()) == [CHANGED, Missing(at_s=START_S + 1, unrouted=3)]
    assert [source.header.router for source in reading.sources] == ["router-a", "router-b"]
    assert reading.samples == [0.5, 1.0]
    assert reading.keys == {"00aa", "00bb"}
