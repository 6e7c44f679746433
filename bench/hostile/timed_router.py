"""Runs ``dualmap`` and times each step of its event loop: ``python -m bench.hostile.timed_router FILE router ...``.

On SIGUSR1 the process writes the longest step since the last SIGUSR1 to FILE, in milliseconds of CPU time and of wall
time. The wall time includes the time in which other processes had the CPU.
"""

import json
import signal
import sys
import time
from asyncio.events import Handle
from pathlib import Path
from types import FrameType


def install(file: Path) -> None:
    """Time all steps of event loops."""
    longest = {"cpu_ms": 0.0, "wall_ms": 0.0}
    run = Handle._run

    def timed(handle: Handle) -> None:
        cpu_s, wall_s = time.thread_time(), time.perf_counter()
        run(handle)
        longest["cpu_ms"] = max(longest["cpu_ms"], (time.thread_time() - cpu_s) * 1e3)
        longest["wall_ms"] = max(longest["wall_ms"], (time.perf_counter() - wall_s) * 1e3)

    def write(_number: int, _frame: FrameType | None) -> None:
        fresh = file.with_name(f"{file.name}.new")
        fresh.write_text(json.dumps(longest))
        fresh.rename(file)
        longest.update(cpu_ms=0.0, wall_ms=0.0)

    Handle._run = timed  # type: ignore[method-assign]
    signal.signal(signal.SIGUSR1, write)


if __name__ == "__main__":
    install(Path(sys.argv.pop(1)))
    from dualmap_cli.main import main

    main()
