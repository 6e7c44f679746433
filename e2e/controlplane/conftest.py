"""Fixtures of the tests against a real Kubernetes control plane.

They need the programs of `build.py` and the network namespace of `netns.sh`: `make e2e` sees to both, and without
them every test here is skipped.
"""

from __future__ import annotations

import shutil
import signal
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

from controlplane import keda
from controlplane.build import binaries_folder, missing
from controlplane.cluster import ADVERTISED, Cluster
from controlplane.kubelet.fixtures import kubelet_fixture  # noqa: F401  # pytest finds fixtures by import
from controlplane.kubelet.process_kubelet import ProcessKubelet
from controlplane.product import Product

# As in pyproject.toml, but for the test alone: whoever comes first starts the control plane.
_TEST_TIMEOUT_S = 120
# The tests' times are those of a quiet machine; in CI the other half of them runs beside.
_PATIENCE = 2
_DIRECTORY = pytest.StashKey[Path]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what cannot run here; give each test its time without its fixtures'."""
    reason = _why_not()
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))
        marker = item.get_closest_marker("timeout")
        limit_s = _TEST_TIMEOUT_S if marker is None else marker.args[0]
        item.add_marker(pytest.mark.timeout(_PATIENCE * limit_s, func_only=True), append=False)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say where the logs are, if they were kept."""
    kept = config.stash.get(_DIRECTORY, None)
    if kept and kept.is_dir():
        terminalreporter.write_line(f"logs of the control plane: {kept / 'logs'}")


@pytest.fixture(scope="session", name="cluster")
def _cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """The control plane that the session's tests share; its logs are kept, and named, when a test failed."""
    directory = Path(tempfile.mkdtemp(prefix="dualmap-controlplane-"))
    request.config.stash[_DIRECTORY] = directory
    with _ended_in_order(), Cluster(binaries_folder(), directory) as cluster:
        yield cluster
    if not request.session.testsfailed:
        shutil.rmtree(directory)


@pytest.fixture(name="product")
async def _product(cluster: Cluster, kubelet: ProcessKubelet, tmp_path: Path) -> AsyncIterator[Product]:
    """Two routers that watch a fresh namespace, in which a test's operators may act."""
    async with Product(cluster, tmp_path) as product:
        yield product


@pytest.fixture(scope="module", name="running_keda")
def _running_keda(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """KEDA, for the tests of one file: meanwhile nobody else can serve external metrics."""
    with keda.running(cluster, tmp_path_factory.mktemp("keda")):
        yield


@pytest.fixture(name="scaler")
def _scaler(running_keda: None, product: Product) -> str:
    """Where KEDA asks (host:port): one router, which knows what all of them see."""
    return f"127.0.0.1:{product.routers[0].ports['grpc']}"


@contextmanager
def _ended_in_order() -> Iterator[None]:
    """Have SIGTERM end pytest as Ctrl-C does: otherwise the programs would be left running."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(f"signal {number}")

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _why_not() -> str | None:
    """What is missing for these tests, if anything."""
    if files := missing():
        return f"not built: {', '.join(files)}: make e2e"
    with socket.socket() as probe:
        try:
            probe.bind((ADVERTISED, 0))
        except OSError:
            return "not in a network namespace for pods: make e2e"
    return None
