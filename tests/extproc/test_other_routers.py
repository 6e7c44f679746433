"""Tests what a router's start and logs say about the other routers."""

import asyncio
import logging

import pytest

from dualmap_extproc.app import other_routers
from dualmap_extproc.app.other_routers import OtherRouters
from dualmap_extproc.peers.peers import Peers
from dualmap_extproc.request.observations import FanOut, OwnerChanged
from dualmap_extproc.settings import Settings
from dualmap_extproc.telemetry.pool_log import log_pool_events
from extproc.peer_routers import KEY, Heard
from extproc.router_meshes import RouterMesh
from extproc.router_processes import running, write_pool


async def test_router_is_ready_only_after_it_has_connected_to_the_others(tmp_path):
    pool = write_pool(tmp_path / "pool.yaml")
    async with (
        running(pool, options=("--replica-id", "a", "--peer", "127.0.0.1:1")) as first,
        running(pool, options=("--replica-id", "b", "--peer", first.grpc)) as second,
    ):
        assert b"dualmap_peers 1.0" in await second.get("/metrics")


async def test_start_does_not_wait_for_routers_that_never_answer(monkeypatch):
    monkeypatch.setattr(other_routers, "CONNECT_S", 0.05)

    async def find():
        return await asyncio.get_running_loop().create_future()

    others = OtherRouters(Settings(replica_id="a"), "a-1")
    others.peers = Peers(Heard(), name="a-1", hash_key=KEY, find=find)
    running_peers = asyncio.create_task(others.peers.run())
    await others.tried()
    assert not running_peers.done()
    running_peers.cancel()


async def test_router_without_others_does_not_wait_for_them():
    await OtherRouters(Settings(replica_id="a"), "a-1").tried()


def test_change_of_the_owner_is_one_log_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    mesh = RouterMesh()
    desk, stays = mesh.others[0], mesh.others[1]
    observations = FanOut()
    log_pool_events(observations)
    desk.observer.events.clear()

    desk.picker.on_routers(1.0, [each.name for each in mesh.others])
    desk.picker.on_routers(2.0, [each.name for each in mesh.others])
    (changed,) = desk.observer.of(OwnerChanged)
    observations.report(changed)

    assert changed.before == mesh.owner.name
    assert changed.owner in (desk.name, stays.name)
    (record,) = [each for each in caplog.records if each.message == "Pool owner changed"]
    assert record.__dict__["details"] == {"pool": changed.pool, "before": changed.before, "owner": changed.owner}
