"""What holds for every unit test: hypothesis ignores the clock of a shared machine, and children get SIGINT."""

import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("shared-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared-machine")


@pytest.fixture(scope="session", autouse=True)
def _sigint_reaches_children() -> Iterator[None]:
    """Reset SIGINT: children inherit it ignored where this command does (`nohup make test &`), but never handled."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
