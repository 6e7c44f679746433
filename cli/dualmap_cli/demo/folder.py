"""The output folder of a demo, locked by one demo at a time.

Two demos in one folder would overwrite each other's pool files and Envoy configurations while both run. The traffic of
one demo could then reach the engines of the other.
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
    """Create ``out`` and lock it against other demos. Raises OutputRefused.

    The kernel releases the lock when the process ends. The empty lock file stays. If the file were removed while
    another demo opens it, two demos could hold a lock.
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
