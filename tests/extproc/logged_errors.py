"""The errors that a test logged."""

import logging

import pytest


def logged_errors(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Return the records of level ERROR and above, without those of gRPC's poller.

    One poller serves all event loops of a process. It logs an error when the loop of an earlier test is closed.
    """
    records = [each for each in caplog.records if each.levelno >= logging.ERROR]
    return [each for each in records if "PollerCompletionQueue" not in each.getMessage()]
