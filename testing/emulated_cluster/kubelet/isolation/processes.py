"""A local process of a container, with its own process group and a log file.

``runtimes.py`` runs a container's command, and the commands of probes and preStop hooks, as such processes.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Self

# With this option, the kernel kills a process when the thread that started the process ends.
_TIED_TO_US: Final = ("setpriv", "--pdeathsig", "KILL", "--")
# Exit status of shells and container runtimes after signal N: 128 + N.
_SIGNALLED: Final = 128


class Process:
    """One running process and its children. The end of the main process is the container's end."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(
        cls, argv: Sequence[str], *, environment: Mapping[str, str], log: Path, descriptors: Sequence[int] = ()
    ) -> Self:
        """Start ``argv``, which appends to ``log`` and inherits ``descriptors``.

        The exit status is 127 if the program does not exist.
        """
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *_TIED_TO_US,
                *argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=dict(environment),
                cwd=log.parent,
                start_new_session=True,
                pass_fds=descriptors,
            )
        return cls(process)

    @property
    def pid(self) -> int:
        """The ID of the main process and of its process group."""
        return self._process.pid

    async def wait(self) -> int:
        """Wait for the main process and kill its children; return its exit status, 128 + N after signal N."""
        status = await self._process.wait()
        self.kill()
        return status if status >= 0 else _SIGNALLED - status

    def terminate(self) -> None:
        """Send SIGTERM to the main process, as a container runtime does."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL to all processes of the group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


async def run(argv: Sequence[str], *, environment: Mapping[str, str], log: Path) -> int:
    """Run ``argv`` to its end and return its exit status; cancellation kills the process."""
    process = await Process.start(argv, environment=environment, log=log)
    try:
        return await process.wait()
    except asyncio.CancelledError:
        process.kill()
        await process.wait()
        raise
