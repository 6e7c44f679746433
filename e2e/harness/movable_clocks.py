"""Runs ``dualmap`` under clocks that a test can move: ``python movable_clocks.py FILE router ...``.

On SIGUSR1 it reads from FILE by how many seconds the wall clock and the monotonic clock are off. The monotonic one,
which is the event loop's, never goes back on a real machine either: it is moved on to have minutes pass at once.
"""

import json
import signal
import sys
import time
from pathlib import Path
from types import FrameType


def install(offsets: Path) -> None:
    """Put both clocks under the file's control."""
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
    # After the clocks: whoever takes a function out of ``time`` shall have the moved one.
    from dualmap_cli.main import main

    main()
