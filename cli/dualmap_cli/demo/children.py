"""The processes of a run. Each process has a log, is watched for crashes, and is stopped at the end.

Every child has its own process group, so Ctrl-C in the terminal reaches only the demo. The demo then stops the children
in order, together with all processes that they have started. ``launch`` stops the children if the demo is killed.
"""

import asyncio
import os
import re
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final, Self, TypeVar

from dualmap_cli.demo import launch
from dualmap_cli.demo.errors import ChildError

T = TypeVar("T")

_POLL_S: Final = 0.05
_TAIL_BYTES: Final = 4096
_TAIL_LINES: Final = 12
_READY = re.compile(r"^dualmap \S+ ready (?P<values>.+)$", re.MULTILINE)
_NAMED = re.compile(r"(\w+)=(\S+)")


class Child:
    """One started process and its log."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self.name = name
        self.process = process
        self.log = log

    async def ready(self, *, within_s: float) -> Mapping[str, str]:
        """Wait for the line ``dualmap COMMAND ready NAME=VALUE ...`` and return its values by name."""

        async def ready_line() -> str | None:
            found = _READY.search(self.log.read_text(errors="replace"))
            return found["values"] if found else None

        return dict(_NAMED.findall(await self.wait_for(ready_line, within_s=within_s)))

    async def wait_for(self, probe: Callable[[], Awaitable[T | None]], *, within_s: float) -> T:
        """Call ``probe`` until it returns a value; raise ChildError if the child exits or the time runs out."""
        try:
            async with asyncio.timeout(within_s):
                while (answer := await probe()) is None:
                    if self.process.returncode is not None:
                        raise self.crashed()
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise self.failed(f"did not become ready within {within_s:g} s") from None
        return answer

    def crashed(self) -> ChildError:
        """Return the error for a child that exited before the end of the run."""
        code = self.process.returncode
        assert code is not None, "it has not exited"
        return self.failed(f"was killed by signal {-code}" if code < 0 else f"exited with code {code}")

    def failed(self, what: str) -> ChildError:
        """Return a ChildError with the end of the log."""
        return ChildError(self.name, what, log=self.log, tail=self.tail())

    def tail(self) -> str:
        """Return the end of the log."""
        with self.log.open("rb") as log:
            log.seek(max(0, self.log.stat().st_size - _TAIL_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-_TAIL_LINES:])

    def signal_group(self, number: signal.Signals) -> None:
        """Send a signal to the child and to all processes that it started. A group that has ended is no error."""
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            return


class Children:
    """A context that starts processes and stops all of them on exit, also after an error."""

    def __init__(self, logs: Path, *, grace_s: float = 3.0) -> None:
        self._logs = logs
        self._grace_s = grace_s
        self._children: list[Child] = []

    async def __aenter__(self) -> Self:
        self._logs.mkdir(parents=True, exist_ok=True)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop()

    async def run(self, name: str, command: Sequence[str], *, into: Path, within_s: float) -> None:
        """Run ``command`` to its end, with stdout in the file ``into`` and stderr in ``NAME.log``."""
        with into.open("wb") as printed:
            child = await self._spawn(name, command, stdout=printed)
        try:
            async with asyncio.timeout(within_s):
                await child.process.wait()
        except TimeoutError:
            raise child.failed(f"did not end within {within_s:g} s") from None
        finally:
            child.signal_group(signal.SIGKILL)
            await child.process.wait()
        if child.process.returncode != 0:
            raise child.crashed()

    async def start(self, name: str, command: Sequence[str]) -> Child:
        """Start ``command`` (an absolute path and arguments) with its output in ``NAME.log`` in the log folder."""
        child = await self._spawn(name, command, stdout=None)
        self._children.append(child)
        return child

    async def _spawn(self, name: str, command: Sequence[str], *, stdout: BinaryIO | None) -> Child:
        path = self._logs / f"{name}.log"
        with path.open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", launch.__file__, str(os.getpid()), *command),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=stdout or log,
                stderr=log,
                start_new_session=True,
            )
        return Child(name, process, path)

    async def guard(self, work: Coroutine[object, object, T]) -> T:
        """Run ``work`` while all children run. The first child that exits ends ``work`` with a ChildError."""
        task = asyncio.ensure_future(work)
        exits = {asyncio.ensure_future(child.process.wait()): child for child in self._children}
        try:
            await asyncio.wait([task, *exits], return_when=asyncio.FIRST_COMPLETED)
            # If `work` fails at the same moment, the crash explains the failure.
            for exited in exits:
                if exited.done():
                    raise exits[exited].crashed()
            return await task
        finally:
            unfinished = [one for one in (task, *exits) if not one.done()]
            for one in unfinished:
                one.cancel()
            await asyncio.gather(*unfinished, return_exceptions=True)

    async def _stop(self) -> None:
        """Send SIGTERM to every process group, then SIGKILL to the remaining processes."""
        for child in self._children:
            child.signal_group(signal.SIGTERM)
        waits = [asyncio.ensure_future(child.process.wait()) for child in self._children]
        if waits:
            await asyncio.wait(waits, timeout=self._grace_s)
        for child in self._children:
            child.signal_group(signal.SIGKILL)
        await asyncio.gather(*waits)
