"""Tests of watching pool files: the watcher applies stable changes, reports errors once, and never ends."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from dualmap.errors import PoolError
from dualmap.pools.pool import Pool
from dualmap_extproc.pools import file as pool_file
from dualmap_extproc.pools.file import PoolFileError, PoolFileWatcher
from extproc.logged_errors import logged_errors
from extproc.pool_files import document, write, write_text
from waiting import WAIT_S


class Watched:
    """A running watcher and its reports, for which a test can wait."""

    def __init__(self) -> None:
        self.applied: asyncio.Queue[tuple[Pool, ...]] = asyncio.Queue()
        self.refused: asyncio.Queue[PoolFileError] = asyncio.Queue()

    async def pools(self) -> dict[str, int]:
        """Wait for the next applied pools; return the number of members per pool."""
        pools = await asyncio.wait_for(self.applied.get(), WAIT_S)
        return {pool.id: len(pool.members) for pool in pools}

    async def refusal(self) -> PoolFileError:
        return await asyncio.wait_for(self.refused.get(), WAIT_S)


@asynccontextmanager
async def watching(*paths: Path) -> AsyncIterator[Watched]:
    watcher = PoolFileWatcher(paths, poll_s=0.01, settle_s=0.01)
    watcher.load()
    watched = Watched()
    task = asyncio.create_task(watcher.run(watched.applied.put_nowait, watched.refused.put_nowait))
    try:
        yield watched
    finally:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


class TestFileChanges:
    def test_watcher_load_rejects_the_same_files_as_load_pool_files(self, tmp_path: Path) -> None:
        with pytest.raises(PoolError):
            PoolFileWatcher([tmp_path / "absent.yaml"]).load()

    async def test_watcher_applies_replaced_and_overwritten_files(self, tmp_path: Path) -> None:
        path = write(tmp_path / "p.yaml", document(members=2))
        async with watching(path) as watched:
            write(path, document(members=3))
            assert await watched.pools() == {"llm/qwen": 3}
            path.write_text(yaml.safe_dump(document(members=4)))
            assert await watched.pools() == {"llm/qwen": 4}

    async def test_watcher_applies_a_change_with_equal_size_and_time(self, tmp_path: Path) -> None:
        path = write(tmp_path / "p.yaml", document("aaaa"))
        stat = path.stat()
        async with watching(path) as watched:
            write(path, document("bbbb"))
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
            assert path.stat().st_size == stat.st_size
            assert await watched.pools() == {"llm/bbbb": 2}

    async def test_watcher_applies_a_replaced_symbolic_link(self, tmp_path: Path) -> None:
        """The test changes the file like an update of a mounted ConfigMap."""
        for version, members in (("v1", 1), ("v2", 2)):
            (tmp_path / version).mkdir()
            write(tmp_path / version / "p.yaml", document(members=members))
        data = tmp_path / "data"
        data.symlink_to("v1")
        async with watching(data / "p.yaml") as watched:
            (tmp_path / "next").symlink_to("v2")
            (tmp_path / "next").rename(data)
            assert await watched.pools() == {"llm/qwen": 2}

    @pytest.mark.parametrize("broken", ["", "kind: [", "kind: Deployment"])
    async def test_watcher_reports_invalid_change_once_without_applying(
        self, tmp_path: Path, broken: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        path = write(tmp_path / "p.yaml", document(members=2))
        other = write(tmp_path / "other.yaml", document("other", members=1))
        async with watching(path, other) as watched:
            write_text(path, broken)
            refusal = await watched.refusal()
            assert refusal.file == path
            # The watcher applies the other file's change, and keeps the last valid pools of the broken file.
            write(other, document("other", members=5))
            assert await watched.pools() == {"llm/qwen": 2, "llm/other": 5}
            write(path, document(members=3))
            assert await watched.pools() == {"llm/qwen": 3, "llm/other": 5}
            assert watched.refused.empty()
        (record,) = logged_errors(caplog)
        assert record.__dict__["details"].keys() == {"file", "field", "value", "accepted"}

    async def test_watcher_reports_missing_file_once_and_reads_restored_file(self, tmp_path: Path) -> None:
        path = write(tmp_path / "p.yaml", document(members=2))
        other = write(tmp_path / "other.yaml", document("other", members=1))
        async with watching(path, other) as watched:
            path.unlink()
            assert (await watched.refusal()).field == "file"
            write(other, document("other", members=2))
            assert await watched.pools() == {"llm/qwen": 2, "llm/other": 2}
            # The original content is not a change; the original content with another member is a change.
            write(path, document(members=2))
            write(other, document("other", members=3))
            assert await watched.pools() == {"llm/qwen": 2, "llm/other": 3}
            write(path, document(members=3))
            assert await watched.pools() == {"llm/qwen": 3, "llm/other": 3}
            assert watched.refused.empty()

    @pytest.mark.parametrize("scalar", ["!!bool maybe", '!!int ""', '!!float ""', "!!timestamp x"])
    async def test_watcher_continues_after_scalars_yaml_cannot_convert(self, tmp_path: Path, scalar: str) -> None:
        path = write(tmp_path / "p.yaml", document(members=2))
        async with watching(path) as watched:
            write_text(path, f"replicas: {scalar}\n")
            assert (await watched.refusal()).field == "line 1, column 11"
            write(path, document(members=3))
            assert await watched.pools() == {"llm/qwen": 3}

    async def test_watcher_rejects_a_folder_in_place_of_the_file(self, tmp_path: Path) -> None:
        path = write(tmp_path / "p.yaml", document(members=2))
        async with watching(path) as watched:
            path.unlink()
            path.mkdir()
            refusal = await watched.refusal()
            if "directory" not in str(refusal.value):  # The state between the two changes.
                refusal = await watched.refusal()
            assert (refusal.file, refusal.field) == (path, "file")
            path.rmdir()
            write(path, document(members=3))
            assert await watched.pools() == {"llm/qwen": 3}

    async def test_watcher_rejects_an_inaccessible_path(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = write(tmp_path / "p.yaml", document(members=2))
        denied = True

        def deny(real: Any) -> Any:
            def method(self: Path, *args: Any, **kwargs: Any) -> Any:
                if denied and self == path:
                    raise PermissionError(13, "Permission denied")
                return real(self, *args, **kwargs)

            return method

        async with watching(path) as watched:
            # These functions replace a folder without permissions, because root can read any folder.
            for name in ("stat", "open", "exists", "is_file"):
                monkeypatch.setattr(Path, name, deny(getattr(Path, name)))
            assert (await watched.refusal()).value == "Permission denied"
            denied = False
            write(path, document(members=3))
            assert await watched.pools() == {"llm/qwen": 3}

    async def test_watcher_continues_after_an_unexpected_error(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        path = write(tmp_path / "p.yaml", document(members=2))
        parsed = pool_file._parse
        failed = asyncio.Event()
        loop = asyncio.get_running_loop()

        def fail(*_: object) -> Any:
            monkeypatch.setattr(pool_file, "_parse", parsed)
            loop.call_soon_threadsafe(failed.set)
            raise RuntimeError("unforeseen")

        async with watching(path) as watched:
            monkeypatch.setattr(pool_file, "_parse", fail)
            write(path, document(members=3))
            await asyncio.wait_for(failed.wait(), WAIT_S)
            write(path, document(members=4))
            assert await watched.pools() == {"llm/qwen": 4}
        assert "unforeseen" in str([record.__dict__.get("details") for record in caplog.records])

    async def test_watcher_reports_each_further_error(self, tmp_path: Path) -> None:
        path = write(tmp_path / "p.yaml", document())
        async with watching(path) as watched:
            write_text(path, "kind: [")
            first = await watched.refusal()
            write_text(path, "a: b: c")
            second = await watched.refusal()
            assert first.value != second.value

    async def test_watcher_accepts_a_pool_moved_to_another_file(self, tmp_path: Path) -> None:
        one = write(tmp_path / "1.yaml", document("a"), document("b"))
        two = write(tmp_path / "2.yaml", document("c"))
        async with watching(one, two) as watched:
            write(two, document("c"), document("b", members=7))
            clash = await watched.refusal()
            assert (clash.file, clash.value) == (two, "llm/b")
            write(one, document("a"))
            assert await watched.pools() == {"llm/a": 2, "llm/c": 2, "llm/b": 7}


class TestRepeatedErrors:
    """A rejected file stays rejected until it is corrected, and each new reason is reported once."""

    def settle(self, watcher: PoolFileWatcher) -> list[str]:
        """Check until there is no change; return the reported reasons."""
        return [str(refusal) for _ in range(4) for refusal in watcher._look().refusals]

    def test_watcher_reports_each_new_reason_once(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "dualmap_extproc")
        path = write(tmp_path / "p.yaml", document())
        watcher = PoolFileWatcher([path])
        watcher.load()
        assert not watcher.refused
        path.unlink()
        (gone,) = self.settle(watcher)
        assert "No such file" in gone
        assert watcher.refused
        path.mkdir()
        (folder,) = self.settle(watcher)
        assert "directory" in folder
        assert watcher.refused
        path.rmdir()
        write(path, document())
        assert self.settle(watcher) == []
        assert not watcher.refused
        assert [each.getMessage() for each in caplog.records] == ["Pool file is valid again"]

    def test_watcher_reports_a_conflict_once(self, tmp_path: Path) -> None:
        one = write(tmp_path / "1.yaml", document("a"))
        two = write(tmp_path / "2.yaml", document("b"))
        watcher = PoolFileWatcher([one, two])
        watcher.load()
        write(two, document("a"))
        assert len(self.settle(watcher)) == 1
        write(one, document("a", members=5))
        assert self.settle(watcher) == []
        assert watcher.refused
        write(two, document("b"))
        assert self.settle(watcher) == []
        assert not watcher.refused


class TestUnsettledChanges:
    """The test calls the checks itself, so that the changes between two of them are exact."""

    def test_watcher_never_applies_a_half_written_file(self, tmp_path: Path) -> None:
        path = write(tmp_path / "p.yaml", document(members=8))
        watcher = PoolFileWatcher([path])
        watcher.load()
        text = yaml.safe_dump(document(members=9))
        # The truncated text is a valid pool with fewer members, so only the following change shows that it is
        # incomplete.
        path.write_text(text[: text.index("10.0.0.4")] + "10.0.0.4")
        look = watcher._look()
        assert (look.pools, look.unsettled) == (None, True)
        path.write_text(text)
        look = watcher._look()
        assert (look.pools, look.unsettled) == (None, True)
        look = watcher._look()
        assert look.pools is not None
        assert len(look.pools[0].members) == 9
        assert (look.unsettled, look.refusals) == (False, ())
        assert watcher._look().pools is None

    def test_watcher_does_not_apply_a_reverted_change(self, tmp_path: Path) -> None:
        path = write(tmp_path / "p.yaml", document(members=2))
        watcher = PoolFileWatcher([path])
        watcher.load()
        path.write_text("")
        assert watcher._look().unsettled
        write(path, document(members=2))
        assert watcher._look() == pool_file._Look(pools=None, refusals=(), unsettled=False)
        path.write_text("")
        assert watcher._look().unsettled
        assert len(watcher._look().refusals) == 1

    def test_watcher_applies_a_change_before_the_first_poll(self, tmp_path: Path) -> None:
        path = write(tmp_path / "p.yaml", document(members=2))
        watcher = PoolFileWatcher([path])
        watcher.load()
        write(path, document(members=3))
        watcher._look()
        pools = watcher._look().pools
        assert pools is not None
        assert len(pools[0].members) == 3

    def test_watcher_ignores_a_changed_comment(self, tmp_path: Path) -> None:
        path = write(tmp_path / "p.yaml", document())
        watcher = PoolFileWatcher([path])
        watcher.load()
        path.write_text(path.read_text() + "# a comment\n")
        assert watcher._look().unsettled
        assert watcher._look() == pool_file._Look(pools=None, refusals=(), unsettled=False)

    def test_watcher_interval_equals_the_documented_interval(self) -> None:
        """A reload takes at most 2 s: a poll, a second check for stability, and up to a second for parsing."""
        assert pool_file.POLL_S + pool_file.SETTLE_S <= 1.0

    def test_watcher_does_not_read_a_pipe_again(self) -> None:
        reader, writer = os.pipe()
        os.write(writer, yaml.safe_dump(document()).encode())
        os.close(writer)
        watcher = PoolFileWatcher([Path(f"/dev/fd/{reader}")])
        watcher.load()
        assert watcher._look() == pool_file._Look(pools=None, refusals=(), unsettled=False)
        os.close(reader)
