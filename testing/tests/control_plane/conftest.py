"""Fixtures of the tests of the emulated cluster that start its control plane."""

from pathlib import Path

import pytest

from emulated_cluster import fixtures


def pytest_configure(config: pytest.Config) -> None:
    """Provide the fixtures `cluster` and `kubelet`, one of each per session."""
    if not config.pluginmanager.is_registered(fixtures):
        config.pluginmanager.register(fixtures)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests that cannot run here."""
    fixtures.prepare(items, Path(__file__).parent)
