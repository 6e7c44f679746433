"""Runs ``dualmap`` with clocks that a test can move: ``python movable_clocks.py FILE router ...``.

On SIGUSR1 the process reads the offsets of the wall clock and the monotonic clock, in seconds, from FILE. The event
loop uses the monotonic clock. A test moves this clock forward to skip minutes, but never back.
"""

import json
import signal
import sys
import time
from pathlib import Path
from types import FrameType


def install(offsets: Path) -> None:
    """Replace both clocks with clocks that add the file's offsets."""
    off = {"wall_s": 0.0, "monotonic_s": 0.0}
    wall, monotonic = time.time, time.monotonic

    def read(_number: int, _frame: FrameType | None) -> None:
        off.update(json.loads(offsets.read_text()))

    time.time = lambda: wall() + off["wall_s"]
    time.time_ns = lambda: int((wall() + off["wall_s"]) * 1e9)
    time.monotonic = lambda: monotonic() + off["monotonic_s"]
    signal.signal(signal.SIGUSR1, read)


if __name__ == "__main__":
    install(Path(sys.argv.pop(1)))
    # This import follows the replacement of the clocks, so that ``from time import ...`` imports the new functions.
    from dualmap_cli.main import main

    main()
