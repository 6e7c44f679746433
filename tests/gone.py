"""Waiting for the end of a process that need not be our child."""

import os
import select

GONE_WITHIN_S = 30.0


def wait_until_gone(pid: int) -> bool:
    """Wait for a process that is not ours; a zombie counts as gone."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], GONE_WITHIN_S)[0])
    finally:
        os.close(handle)
