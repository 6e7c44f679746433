"""Fixtures of the tests against a real Kubernetes control plane.

They need the programs of `build.py` and the network namespace of `netns.sh`: `make e2e` sees to both, and without
them every test here is skipped.
"""

from __future__ import annotations

import shutil
import signal
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest

from controlplane.build import binaries_folder
from controlplane.cluster import ADVERTISED, Cluster

# As in pyproject.toml, but for the test alone: whoever comes first starts the control plane.
_TEST_TIMEOUT_S = 120


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what cannot run here; give each test its time without its fixtures'."""
    reason = _why_not()
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(_TEST_TIMEOUT_S, func_only=True))


@pytest.fixture(scope="session", name="cluster")
def _cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """The control plane that the session's tests share; its logs are kept, and named, when a test failed."""
    # Whoever ends pytest, `timeout` for one, would leave the programs running.
    before = signal.signal(signal.SIGTERM, _interrupt)
    directory = Path(tempfile.mkdtemp(prefix="dualmap-controlplane-"))
    try:
        with Cluster(binaries_folder(), directory) as cluster:
            yield cluster
    finally:
        signal.signal(signal.SIGTERM, before)
        if request.session.testsfailed:
            print(f"\nlogs of the control plane: {directory / 'logs'}")
        else:
            shutil.rmtree(directory)


def _why_not() -> str | None:
    """What is missing for these tests, if anything."""
    if not binaries_folder().is_dir():
        return "the control plane is not built: make e2e"
    with socket.socket() as probe:
        try:
            probe.bind((ADVERTISED, 0))
        except OSError:
            return "not in a network namespace for pods: make e2e"
    return None


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt(f"signal {number}")
