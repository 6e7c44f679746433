"""``dualmap router --record`` as a process: SIGTERM, SIGKILL, a second router, and a disk that takes no more."""

import asyncio
import resource
from pathlib import Path

import grpc.aio
import pytest

from extproc.envoy_messages import chat
from extproc.router_processes import Router, launch, picked, running, write_pool
from recorded_folder import requests_of
from waiting import until

pytestmark = pytest.mark.usefixtures("transport")
LONG = "the quick brown fox " * 100


async def refused(router: Router, count: int = 1) -> None:
    """Send requests that the router refuses, because the pool has no member."""
    async with grpc.aio.insecure_channel(router.grpc) as channel:
        for _ in range(count):
            assert await picked(channel, chat(LONG)) is None


async def metric(router: Router, name: str) -> float:
    page = (await router.get("/metrics")).decode()
    return next(float(line.split()[1]) for line in page.splitlines() if line.startswith(f"{name} "))


@pytest.fixture(name="empty")
def _empty(tmp_path: Path) -> Path:
    return write_pool(tmp_path / "pool.yaml", members=0)


async def test_recorded_requests_are_on_disk_while_the_router_runs_and_after_kill(tmp_path: Path, empty: Path) -> None:
    folder = tmp_path / "recording"
    async with running(empty, options=("--record", str(folder))) as router:
        await refused(router, 3)
        await until(lambda: len(requests_of(folder)) == 3)
        assert await metric(router, "dualmap_recording_up") == 1
        router.process.kill()
        await router.exited()

    async with running(empty, options=("--record", str(folder))) as router:
        await refused(router)
        # SIGTERM writes what is not on disk yet.
        router.stop()
        assert await router.exited() == 0

    before, *_, after = requests_of(folder)
    assert len(requests_of(folder)) == 4
    # Without a hash key, the restarted router has the one of the folder.
    assert before.blocks == after.blocks != ()


async def test_routers_with_a_copied_key_record_equal_hashes(tmp_path: Path, empty: Path) -> None:
    folders = [tmp_path / name for name in ("first", "second", "other")]
    for folder in folders:
        folder.mkdir()
        if folder.name == "second":
            (folder / "key").write_bytes((folders[0] / "key").read_bytes())
        async with running(empty, options=("--record", str(folder))) as router:
            await refused(router)
            router.stop()
            assert await router.exited() == 0

    (first,), (second,), (other,) = map(requests_of, folders)
    assert first.blocks == second.blocks
    assert not set(first.blocks) & set(other.blocks)


async def test_second_router_with_the_same_folder_ends_with_status_2(tmp_path: Path, empty: Path) -> None:
    folder = tmp_path / "recording"
    async with running(empty, options=("--record", str(folder))):
        second = await launch("--pool", str(empty), "--record", str(folder))
        _, error = await second.communicate()

    assert second.returncode == 2
    assert f"--record {folder}: another router records there" in error.decode()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--record", ""), "'' is not accepted; give a folder"),
        (("--record", "FILE"), "--record FILE: is not a folder; give the path of a folder"),
        (("--record", "FILE/inside"), "--record FILE/inside: is not a folder"),
        (("--record", "BADKEY"), "BADKEY/key: is not accepted; give a file with 64 hex digits, or delete it"),
        (("--record", "DIR", "--record-max", "999999"), "'999999' is not accepted; give at least 1MB"),
        (("--record", "DIR", "--record-sample", "0"), "'0' is not accepted; give a share above 0 and at most 1"),
        (("--record", "DIR", "--record-sample", "all"), "'all' is not accepted; give a share above 0"),
        (("--record", "DIR", "--record-sample", "nan"), "'nan' is not accepted; give a share above 0"),
        (("--record-max", "1GB"), "--record-max requires --record; add --record DIR or omit --record-max"),
    ],
    ids=str,
)
async def test_router_with_wrong_recording_options_ends_with_status_2(
    tmp_path: Path, empty: Path, options: tuple[str, ...], said: str
) -> None:
    (tmp_path / "FILE").touch()
    (tmp_path / "BADKEY").mkdir()
    (tmp_path / "BADKEY" / "key").write_text("secret")
    given = [str(tmp_path / each) if (each.isalpha() and each.isupper()) or "/" in each else each for each in options]

    process = await launch("--pool", str(empty), *given)
    _, error = await process.communicate()

    assert process.returncode == 2
    assert said in error.decode().replace(f"{tmp_path}/", "").replace("\n", " ")


async def test_full_disk_stops_the_recording_and_not_the_router(tmp_path: Path, empty: Path) -> None:
    folder = tmp_path / "recording"
    async with running(empty, options=("--record", str(folder), "--log-format", "json")) as router:
        await refused(router)
        await until(lambda: len(requests_of(folder)) == 1)
        before = resource.prlimit(router.process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(router.process.pid, resource.RLIMIT_FSIZE, (10, before[1]))

        async def is_down() -> bool:
            await refused(router)
            return await metric(router, "dualmap_recording_up") == 0

        await until(is_down)
        await refused(router, 3)
        resource.prlimit(router.process.pid, resource.RLIMIT_FSIZE, before)

        async def is_up() -> bool:
            await refused(router)
            return await metric(router, "dualmap_recording_up") == 1

        await until(is_up)
        assert await metric(router, "dualmap_recording_dropped_total") > 0
        router.stop()
        assert router.process.stderr is not None
        log = (await router.process.stderr.read()).decode()
        assert await asyncio.wait_for(router.process.wait(), 60.0) == 0
    assert log.count("Recording stopped, trying again") == 1
    assert "File too large" in log
    assert requests_of(folder)
