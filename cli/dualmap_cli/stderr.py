"""Makes commands independent of their stderr: a log reader that leaves neither stops a command nor fails it."""

import io
import os
import sys
from typing import Any


class _DroppingFile(io.FileIO):
    """A file that drops what cannot be written to it."""

    def write(self, data: Any, /) -> int:
        """Write ``data``; return its length where the reader is gone or the disk is full."""
        try:
            return super().write(data)
        except OSError:
            return len(data)


def drop_what_stderr_refuses() -> None:
    """Replace this process's ``sys.stderr`` by a stream on the same descriptor that never fails.

    Otherwise the first line after the reader has gone raises BrokenPipeError; or it stays in the buffer, which Python
    fails to flush at exit and therefore exits with status 120. A stream that tests have put in place of stderr stays.
    """
    stderr = sys.__stderr__
    if sys.stderr is not stderr:
        return
    if stderr is None:  # The command was started with its stderr closed (2>&-).
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - It lasts as long as the process.
    else:
        # Without a buffer: a signal handler that prints while a line is printed would find the buffer locked.
        file = _DroppingFile(stderr.fileno(), "w", closefd=False)
        sys.stderr = io.TextIOWrapper(file, encoding=stderr.encoding, errors=stderr.errors, write_through=True)
