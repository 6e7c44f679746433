"""The folder of a recording: its key, its lock, its bound, and a disk that fails for a while."""

import logging
import shutil
import stat
from pathlib import Path

import pytest

from dualmap.recordings.values import Header, Missing, PoolChanged, RecordedRequest
from dualmap_extproc.recording.files import FILES, RecordingFiles
from dualmap_extproc.recording.folder import RecordingError, RecordingFolder
from dualmap_extproc.recording.writer import RETRY_S
from extproc.envoy_messages import chat, pool
from extproc.recording_desks import MAX_BYTES, RecordingDesk
from recorded_folder import files_of, lines_of, requests_of, text_of


def test_key_is_made_once_and_private(tmp_path: Path) -> None:
    folder = RecordingFolder(tmp_path / "a" / "b")
    secret = folder.open()
    folder.close()

    key = folder.path / "key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert bytes.fromhex(key.read_text()) == secret
    assert RecordingFolder(folder.path).open() == secret


@pytest.mark.parametrize("content", [b"", b"abc", b"x" * 64, b"0" * 66])
def test_key_of_another_form_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "key").write_bytes(content)

    with pytest.raises(RecordingError, match="give a file with 64 hex digits, or delete it"):
        RecordingFolder(tmp_path).open()


def test_folder_of_another_router_is_refused_until_it_ends(tmp_path: Path) -> None:
    first, second = RecordingFolder(tmp_path), RecordingFolder(tmp_path)
    first.open()

    with pytest.raises(RecordingError, match="another router records there; give each router a folder of its own"):
        second.open()

    first.close()
    second.open()
    assert second.is_open()


def test_recording_stays_below_its_bound_and_loses_the_oldest(tmp_path: Path) -> None:
    desk = RecordingDesk(tmp_path, pool(), max_bytes=MAX_BYTES)
    last = 0
    # Each prompt has about 4 kB of hashes, which do not compress: three times the bound in total.
    for number in range(800):
        desk.serve(chat(f"{number} " + "x" * 256_000), now=10.0 + number)
        if number % 10 == 9:
            desk.tick(20.0 + number)
            assert sum(each.stat().st_size for each in tmp_path.iterdir()) <= MAX_BYTES
            last = number

    requests = requests_of(tmp_path)
    arrivals = [round(each.arrived_s - requests[-1].arrived_s) for each in requests]
    assert arrivals == list(range(1 - len(requests), 1))
    assert last == 799
    assert len(files_of(tmp_path)) >= FILES
    # No more than the oldest file was lost too early.
    assert sum(each.stat().st_size for each in tmp_path.iterdir()) > MAX_BYTES * 3 // 4
    for file in files_of(tmp_path):
        first, second = lines_of(tmp_path)[:2]
        assert isinstance(first, Header)
        assert isinstance(second, PoolChanged)
        assert text_of(file).startswith('{"kind":"recording","version":1')


def test_earlier_files_count_in_the_bound(tmp_path: Path) -> None:
    old = tmp_path / "requests-20200101T000000Z-0000.jsonl.gz"
    old.write_bytes(b"x" * (MAX_BYTES - 100))
    other = tmp_path / "notes.txt"
    other.write_text("mine")
    files = RecordingFiles(tmp_path, MAX_BYTES, lambda _: b"head\n")

    files.append(1e9, b"line\n" * 100)

    assert not old.exists()
    assert other.exists()
    assert [text_of(each) for each in files_of(tmp_path)] == ["head\n" + "line\n" * 100]


def test_file_that_is_cut_off_is_readable_to_its_last_batch(tmp_path: Path) -> None:
    desk = RecordingDesk(tmp_path)
    for number in range(3):
        desk.serve(now=10.0 + number)
        desk.tick(20.0 + number)
    (file,) = files_of(tmp_path)

    file.write_bytes(file.read_bytes()[:-10])

    assert len(requests_of(tmp_path)) == 2


def test_folder_that_is_gone_stops_the_recording_until_it_is_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    desk = RecordingDesk(tmp_path / "recording")
    desk.serve()
    desk.tick()
    assert desk.metric("up") == 1
    shutil.rmtree(desk.path)
    with caplog.at_level(logging.INFO, logger="dualmap_extproc"):
        for number in range(3):
            desk.serve(now=30.0 + number)
            desk.tick(40.0 + number)
        assert not desk.path.exists()
        assert (desk.metric("up"), desk.metric("dropped_total")) == (0, 3)
        desk.path.mkdir()
        desk.serve(now=50.0)
        desk.tick(60.0)
        assert desk.metric("up") == 0
        desk.clock_s = RETRY_S
        desk.serve(now=60.0)
        desk.tick(70.0)

    assert [record.message for record in caplog.records] == ["Recording stopped, trying again", "Recording continues"]
    assert (desk.metric("up"), desk.metric("dropped_total")) == (1, 4)
    header, state, *_ = desk.lines()
    assert isinstance(header, Header)
    assert isinstance(state, PoolChanged)
    assert [type(each) for each in desk.lines()[2:]] == [RecordedRequest, Missing]
    assert desk.lines()[-1] == Missing(desk.lines()[-1].at_s, 0, 4)
    assert bytes.fromhex((desk.path / "key").read_text()) == desk.folder.secret


def test_folder_with_another_key_is_not_used_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    desk = RecordingDesk(tmp_path / "recording")
    shutil.rmtree(desk.path)
    desk.path.mkdir()
    (desk.path / "key").write_text("0" * 64)
    with caplog.at_level(logging.INFO, logger="dualmap_extproc"):
        desk.serve()
        desk.tick()

    (record,) = caplog.records
    assert "is another key than at the start; restart the router" in record.details["error"]
    assert files_of(desk.path) == []
    assert desk.metric("up") == 0
