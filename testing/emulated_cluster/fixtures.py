"""Pytest plugin for tests on a control plane: the fixtures `cluster` and `kubelet`, skips and time limits.

A `conftest.py` registers this plugin, so that all test folders of one session share one control plane. The tests need
the programs of `build.py` and the network namespace of `netns.sh`; `make e2e` provides both.
"""

from __future__ import annotations

import shutil
import signal
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

from emulated_cluster.control_plane.build import binaries_folder, missing
from emulated_cluster.control_plane.cluster import ADVERTISED, Cluster
from emulated_cluster.kubelet.fixtures import kubelet_fixture  # noqa: F401  # pytest finds fixtures by import

# The limit of pyproject.toml, but without the time of fixtures, because the first test also starts the control plane.
_TEST_TIMEOUT_S = 120
# A factor for time limits. The limits assume an idle machine, but in CI the other half of the tests runs at the same
# time.
_PATIENCE = 2
_DIRECTORY = pytest.StashKey[Path]()


def prepare(items: list[pytest.Item], folder: Path) -> None:
    """Skip the tests of a folder if they cannot run here; exclude fixtures from their time limits."""
    reason = _why_not()
    for item in items:
        if folder not in item.path.parents:
            continue
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))
        marker = item.get_closest_marker("timeout")
        limit_s = _TEST_TIMEOUT_S if marker is None else marker.args[0]
        item.add_marker(pytest.mark.timeout(_PATIENCE * limit_s, func_only=True), append=False)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the folder of the logs if the session kept the logs."""
    kept = config.stash.get(_DIRECTORY, None)
    if kept and kept.is_dir():
        terminalreporter.write_line(f"logs of the control plane: {kept / 'logs'}")


@pytest.fixture(scope="session", name="cluster")
def _cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """The control plane that all tests of a session share. The session keeps the logs if a test failed."""
    directory = Path(tempfile.mkdtemp(prefix="dualmap-controlplane-"))
    request.config.stash[_DIRECTORY] = directory
    with _ended_in_order(), Cluster(binaries_folder(), directory) as cluster:
        yield cluster
    if not request.session.testsfailed:
        shutil.rmtree(directory)


@contextmanager
def _ended_in_order() -> Iterator[None]:
    """Treat SIGTERM like Ctrl-C, so that pytest stops the programs before it ends."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(f"signal {number}")

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _why_not() -> str | None:
    """Return why the tests cannot run, or None."""
    if files := missing():
        return f"not built: {', '.join(files)}: make e2e"
    with socket.socket() as probe:
        try:
            probe.bind((ADVERTISED, 0))
        except OSError:
            return "not in a network namespace for pods: make e2e"
    return None
