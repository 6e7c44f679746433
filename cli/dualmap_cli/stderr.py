"""Makes commands independent of their stderr: a log reader that exits neither stops a command nor makes it fail."""

import io
import os
import sys
from typing import Any


class _DroppingFile(io.FileIO):
    """A file that drops data that cannot be written."""

    def write(self, data: Any, /) -> int:
        """Write ``data`` and return its length, also if the reader has exited or the disk is full."""
        try:
            return super().write(data)
        except OSError:
            return len(data)


def drop_what_stderr_refuses() -> None:
    """Replace this process's ``sys.stderr`` by a stream on the same descriptor that never fails.

    Without this stream, the first line after the reader's exit raises BrokenPipeError. If the line stays in the buffer,
    Python fails to flush the buffer at exit and exits with status 120. If a test has replaced ``sys.stderr``, its
    stream stays.
    """
    stderr = sys.__stderr__
    if sys.stderr is not stderr:
        return
    if stderr is None:  # The command was started with a closed stderr (2>&-).
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - The file stays open as long as the process runs.
    else:
        # The stream has no buffer. A signal handler that prints during another print would find the buffer locked.
        file = _DroppingFile(stderr.fileno(), "w", closefd=False)
        sys.stderr = io.TextIOWrapper(file, encoding=stderr.encoding, errors=stderr.errors, write_through=True)
