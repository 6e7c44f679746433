"""A local process as a container holds it: a group of its own, a log file, signals by id.

``containers.py`` runs a container's command by it, ``actions.py`` the commands of probes and preStop.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Self

# Where the thread that started a process ends without stopping it, the kernel does.
_TIED_TO_US: Final = ("setpriv", "--pdeathsig", "KILL", "--")
# How a shell and a container runtime tell an end by a signal.
_SIGNALLED: Final = 128


class Process:
    """One running process and whatever it starts. A container's end is its main process' end."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(
        cls, argv: Sequence[str], *, environment: Mapping[str, str], log: Path, descriptors: Sequence[int] = ()
    ) -> Self:
        """Start ``argv``, writing on in ``log`` and inheriting ``descriptors``.

        A program that does not exist shows as exit status 127.
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
        """The main process' id, which is its group's too."""
        return self._process.pid

    async def wait(self) -> int:
        """Return the main process' exit status, 128 + N after signal N; what it started is killed with it."""
        status = await self._process.wait()
        self.kill()
        return status if status >= 0 else _SIGNALLED - status

    def terminate(self) -> None:
        """Send SIGTERM to the main process, as a container runtime does."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL to everything in the group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


async def run(argv: Sequence[str], *, environment: Mapping[str, str], log: Path) -> int:
    """Run ``argv`` to its end and return its exit status; who gives up waiting kills it."""
    process = await Process.start(argv, environment=environment, log=log)
    try:
        return await process.wait()
    except asyncio.CancelledError:
        process.kill()
        await process.wait()
        raise
