"""The folder of a router's recording: its lock, and the secret key that it makes or finds there."""

import fcntl
import os
import re
import secrets
from pathlib import Path
from typing import Final

from dualmap.errors import DualMapError
from dualmap_extproc.recording.hashing import SECRET_BYTES

KEY_FILE: Final = "key"
LOCK_FILE: Final = "lock"
_SECRET: Final = re.compile(rb"[0-9a-fA-F]{%d}" % (2 * SECRET_BYTES))


class RecordingError(DualMapError):
    """A folder in which this router cannot record; the message says why."""


class RecordingFolder:
    """The folder ``path``, locked for this router from ``open`` to the end of the process or ``close``.

    ``secret`` is the content of its key; None before the folder was open once.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.secret: bytes | None = None
        self._lock: int | None = None

    def open(self) -> bytes:
        """Lock the folder and return its secret; make both at the first start.

        A folder that was open before and is gone is not made again: it may be a volume that is no longer there. Raises
        RecordingError for a folder of another router or with another key, and OSError.
        """
        if self.secret is None:
            self.path.mkdir(parents=True, exist_ok=True)
        self.close()
        self._lock = _locked(self.path)
        secret = read_secret(self.path / KEY_FILE)
        if secret is None:
            secret = secrets.token_bytes(SECRET_BYTES) if self.secret is None else self.secret
            _write_secret(self.path / KEY_FILE, secret)
        if self.secret not in (None, secret):
            raise RecordingError(f"{self.path / KEY_FILE}: is another key than at the start; restart the router")
        self.secret = secret
        return secret

    def is_open(self) -> bool:
        """Return whether the folder is still the one that this router locked."""
        if self._lock is None:
            return False
        try:
            found = os.stat(self.path / LOCK_FILE)
        except OSError:
            return False
        return os.path.samestat(found, os.fstat(self._lock))

    def close(self) -> None:
        """Unlock the folder."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _locked(folder: Path) -> int:
    """Return the descriptor that holds the lock of a folder."""
    lock = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise RecordingError(f"{folder}: another router records there; give each router a folder of its own") from None
    except OSError:
        os.close(lock)
        raise
    return lock


def read_secret(file: Path) -> bytes | None:
    """Return the secret in a file; None without the file."""
    try:
        text = file.read_bytes().strip()
    except FileNotFoundError:
        return None
    if not _SECRET.fullmatch(text):
        raise RecordingError(f"{file}: is not accepted; give a file with {2 * SECRET_BYTES} hex digits, or delete it")
    return bytes.fromhex(text.decode())


def _write_secret(file: Path, secret: bytes) -> None:
    """Write a secret that only this user can read. A full disk leaves no part of a key."""
    new = file.with_name(f"{file.name}.new")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "wb") as writing:
        writing.write(f"{secret.hex()}\n".encode())
    new.replace(file)
