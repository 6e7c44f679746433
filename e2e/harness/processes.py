"""Child processes of the end-to-end tests, each with a log file; tests wait for log lines and stop processes by their
IDs.
"""

import asyncio
import contextlib
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from harness.waiting import until

# The limit is long, because several processes start at once and other work may use most of the CPU time.
START_TIMEOUT_S = 60.0
# A router drains for up to 25 s.
STOP_TIMEOUT_S = 40.0


class Child:
    """One child process, with its output in ``log``.

    Leaving the context stops the process, with SIGKILL if necessary.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str | Path],
        *,
        directory: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self._environment = environment
        self.argv = [str(part) for part in argv]
        self.log = directory / f"{name}.log"
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        return self._running().pid

    @property
    def returncode(self) -> int | None:
        return self._running().returncode

    async def start(self) -> None:
        """Start the process; a restarted child appends to the same log."""
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self.argv, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, env=self._environment
            )

    async def wait_for_line(self, pattern: str, *, timeout_s: float = START_TIMEOUT_S, after: int = 0) -> re.Match[str]:
        """Wait until the log after character ``after`` matches; fail immediately if the child exits before."""
        found: re.Match[str] | None = None

        async def printed() -> bool:
            nonlocal found
            ended = self.returncode is not None
            found = re.search(pattern, self.output()[after:])
            assert found or not ended, f"{self.name} exited with {self.returncode}:\n{self.output()[-4000:]}"
            return found is not None

        await until(printed, f"{self.name} prints {pattern!r}", timeout_s=timeout_s)
        assert found is not None
        return found

    def output(self) -> str:
        """Return the child's output so far."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def terminate(self) -> None:
        """Send SIGTERM."""
        with contextlib.suppress(ProcessLookupError):
            self._running().terminate()

    def pause(self) -> None:
        """Pause the process (SIGSTOP), so that its ports accept connections but nothing answers."""
        self._running().send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Continue the process after ``pause``."""
        with contextlib.suppress(ProcessLookupError):
            self._running().send_signal(signal.SIGCONT)

    async def kill(self) -> None:
        """Send SIGKILL and wait until the process has ended."""
        with contextlib.suppress(ProcessLookupError):
            self._running().kill()
        await self._running().wait()

    async def wait(self, *, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Wait until the process has ended; return its exit status."""
        return await asyncio.wait_for(self._running().wait(), timeout_s)

    async def stop(self) -> int:
        """Send SIGTERM, then SIGKILL after a timeout; return the exit status."""
        if self._process is None:
            return 0
        self.terminate()
        # A paused process handles no signal.
        self.resume()
        try:
            return await self.wait()
        except TimeoutError:
            await self.kill()
            return await self.wait()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    def _running(self) -> asyncio.subprocess.Process:
        assert self._process is not None, f"{self.name} was not started"
        return self._process


def dualmap_argv(*arguments: str | Path) -> list[str]:
    """Return the command line of a ``dualmap`` subcommand with this interpreter."""
    return python_argv("-m", "dualmap_cli", *arguments)


def python_argv(*arguments: str | Path) -> list[str]:
    """Return the command line of this interpreter with these arguments."""
    return [sys.executable, *map(str, arguments)]
