"""The folder a demo writes to, held by one demo at a time.

Two demos in one folder would overwrite each other's pool files and bootstraps while both are live, and the traffic
of one would silently reach the engines of the other.
"""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from dualmap_cli.demo.errors import OutputRefused

LOCK_FILE: Final = "demo.lock"


@contextmanager
def held(out: Path) -> Iterator[None]:
    """Create ``out`` and keep other demos from it. Raises OutputRefused.

    The lock goes with the process, however it ends. The empty file stays: one that is removed while a third demo
    opens it would be locked by two.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = (out / LOCK_FILE).open("w")
    except OSError as error:
        raise OutputRefused(f"{out}: {error.strerror}; give a writable folder") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OutputRefused(f"another demo is writing to {out}; give a different --out") from None
        yield
