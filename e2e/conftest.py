"""Fixtures of the end-to-end tests: the shared world, one deployment per message mode, and the stage for faults."""

import signal
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from dualmap_extproc.envoy.config.settings import Mode
from harness.deployment import Deployment
from harness.stage import Stage
from harness.world import World


@pytest.fixture(scope="session", autouse=True)
def _sigint_reaches_children() -> Iterator[None]:
    """Reset SIGINT: children inherit it ignored where this command does (`nohup make test &`), but never handled."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest_asyncio.fixture(scope="session", loop_scope="session", name="shared_world")
async def _shared_world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    async with World(tmp_path_factory.mktemp("world")) as world:
        yield world


@pytest_asyncio.fixture(loop_scope="session", name="world")
async def _world(shared_world: World) -> World:
    """The engines, as if nobody had asked them anything before."""
    shared_world.reset()
    return shared_world


@pytest_asyncio.fixture(loop_scope="session", params=list(Mode), ids=lambda mode: mode.value, name="deployment")
async def _deployment(world: World, request: pytest.FixtureRequest) -> AsyncIterator[Deployment]:
    """One deployment per mode; whatever a test did, its router's books must come to rest after it."""
    deployment = await world.deployment(request.param)
    yield deployment
    if deployment.router.returncode is None:
        await deployment.wait_for_rest()


@pytest_asyncio.fixture(scope="session", loop_scope="session", name="shared_stage")
async def _shared_stage(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    async with Stage(tmp_path_factory.mktemp("stage") / "0") as stage:
        yield stage


@pytest_asyncio.fixture(loop_scope="session", name="stage")
async def _stage(shared_stage: Stage) -> AsyncIterator[Stage]:
    """Two routers under one Envoy, all of it running; whatever a test broke, nothing of it may be left after it."""
    await shared_stage.heal()
    yield shared_stage
    await shared_stage.wait_for_rest()
