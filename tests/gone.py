"""Waits for the end of a process that is not a child process."""

import os
import select

GONE_WITHIN_S = 30.0


def wait_until_gone(pid: int) -> bool:
    """Wait for the end of a process that is not a child; a zombie counts as ended."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], GONE_WITHIN_S)[0])
    finally:
        os.close(handle)
