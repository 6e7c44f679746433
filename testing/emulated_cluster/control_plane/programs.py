"""Child processes with a log file: start, wait until ready, stop.

The calls are synchronous because a control plane outlives the event loops of the tests.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

_POLL_S = 0.05
_LOG_SHOWN_CHARS = 4000


class ProgramError(AssertionError):
    """A program ended or was not ready in time. The message has the last lines of the program's log."""


class Program:
    """One program. A restarted program appends to the same log file."""

    def __init__(self, argv: Sequence[str | Path], *, log: Path) -> None:
        self._argv = [str(part) for part in argv]
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The process ID."""
        assert self._process is not None, f"{self._argv[0]} is not running"
        return self._process.pid

    def start(self, *extra: str) -> None:
        """Start the program, with the flags `extra` after the usual flags; do not wait until the program is ready."""
        assert self._process is None, f"{self._argv[0]} is running"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*self._argv, *extra], stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )

    def wait_until(self, ready: Callable[[], bool], what: str, *, timeout_s: float) -> None:
        """Return when `ready` returns True; raise `ProgramError` if the program ends first or after `timeout_s`."""

        def alive_and_ready() -> bool:
            if self._process is None or self._process.poll() is not None:
                raise ProgramError(f"{self._argv[0]} ended before {what}:\n{self._end_of_log()}")
            return ready()

        try:
            wait_until(alive_and_ready, what, timeout_s=timeout_s)
        except TimeoutError as late:
            raise ProgramError(f"{self._argv[0]}: {late}:\n{self._end_of_log()}") from late

    def stop(self, *, grace_s: float) -> None:
        """Send SIGTERM, and SIGKILL after `grace_s`; do nothing if the program does not run."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(grace_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _end_of_log(self) -> str:
        return self._log.read_text(errors="replace")[-_LOG_SHOWN_CHARS:]


def wait_until(check: Callable[[], bool], what: str, *, timeout_s: float) -> None:
    """Return when `check` returns True; after `timeout_s`, raise `TimeoutError` with `what` in the message."""
    deadline = time.monotonic() + timeout_s
    while not check():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout_s:.0f} s: {what}")
        time.sleep(_POLL_S)
