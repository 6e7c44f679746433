"""Fixtures of the end-to-end tests: shared engines, one deployment per message mode, and the system for fault tests."""

import signal
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from dualmap_extproc.envoy.config.settings import Mode
from harness import fail_open
from harness.deployment import Deployment
from harness.replicated_system import ReplicatedSystem
from harness.shared_engines import SharedEngines


@pytest.fixture(scope="session", autouse=True)
def _sigint_reaches_children() -> Iterator[None]:
    """Reset SIGINT, because children inherit an ignored signal (`nohup make test &`)."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def _no_hidden_failures(request: pytest.FixtureRequest) -> Iterator[None]:
    """Check the counters of failures that clients do not see.

    No router may end a connection by GOAWAY except in a drain. With the mark ``always_picked``, no request of the test
    may pass Envoy without a pick.
    """
    before = fail_open.counts()
    yield
    failures = fail_open.counts() - before
    if request.node.get_closest_marker("always_picked") is None:
        failures = fail_open.goaways(failures)
    assert not failures


@pytest_asyncio.fixture(scope="session", loop_scope="session", name="shared_engines")
async def _shared_engines(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SharedEngines]:
    async with SharedEngines(tmp_path_factory.mktemp("engines")) as engines:
        yield engines


@pytest_asyncio.fixture(loop_scope="session", name="engines")
async def _engines(shared_engines: SharedEngines) -> SharedEngines:
    """Return the shared engines with their initial answers."""
    shared_engines.reset()
    return shared_engines


@pytest_asyncio.fixture(loop_scope="session", params=list(Mode), ids=lambda mode: mode.value, name="deployment")
async def _deployment(engines: SharedEngines, request: pytest.FixtureRequest) -> AsyncIterator[Deployment]:
    """Yield one deployment per mode; after each test the deployment's router must have no load."""
    deployment = await engines.deployment(request.param)
    yield deployment
    if deployment.router.returncode is None:
        await deployment.wait_for_rest()


@pytest_asyncio.fixture(loop_scope="session", params=list(Mode), ids=lambda mode: mode.value, name="one_pool")
async def _one_pool(engines: SharedEngines, request: pytest.FixtureRequest) -> AsyncIterator[Deployment]:
    """Yield one deployment per mode with only the pool ``scripted``, which gets requests without a pick."""
    deployment = await engines.deployment(request.param, "scripted")
    yield deployment
    if deployment.router.returncode is None:
        await deployment.wait_for_rest()


@pytest_asyncio.fixture(scope="session", loop_scope="session", name="shared_system")
async def _shared_system(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ReplicatedSystem]:
    async with ReplicatedSystem(tmp_path_factory.mktemp("system") / "0") as system:
        yield system


@pytest_asyncio.fixture(loop_scope="session", name="system")
async def _system(shared_system: ReplicatedSystem) -> AsyncIterator[ReplicatedSystem]:
    """Yield two running routers behind one Envoy; check after each test that no load and no leak remains."""
    await shared_system.heal()
    yield shared_system
    await shared_system.wait_for_rest()
