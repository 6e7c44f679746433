"""The key of an imported recording: that of a router's folder, or a new one."""

import secrets
from collections.abc import Sequence
from pathlib import Path

import click

from dualmap_extproc.recording.folder import RecordingError, read_secret
from dualmap_extproc.recording.hashing import SECRET_BYTES, KeyedHashes, Purpose, fingerprint, roots_key


class RecordingKey:
    """The keyed hashes of a router that records with ``secret``, and whose prompts have the key ``hash_key``.

    None is the key of prompts that a router makes of ``secret``.
    """

    def __init__(self, secret: bytes, hash_key: bytes | None) -> None:
        self._hashes = KeyedHashes(secret)
        self.root_key = roots_key(secret) if hash_key is None else hash_key
        self.fingerprint = fingerprint(secret, self.root_key)

    def blocks(self, hashes: Sequence[int]) -> tuple[int, ...]:
        """Return the keyed hashes of blocks."""
        return self._hashes.keyed(hashes, Purpose.BLOCK)

    def session(self, value: int) -> int:
        """Return the keyed hash of a session."""
        return self._hashes.one(value, Purpose.SESSION)

    def request(self, request_id: str) -> int:
        """Return the keyed hash of a request's x-request-id."""
        return self._hashes.text(request_id, Purpose.REQUEST)


def recording_key(file: Path | None, hash_key: bytes | None) -> RecordingKey:
    """Return the key in a file of a router's folder, or a new key. Raises a usage error."""
    if file is None:
        return RecordingKey(secrets.token_bytes(SECRET_BYTES), hash_key)
    try:
        secret = read_secret(file)
    except (OSError, RecordingError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise click.BadParameter(f"{file}: {reason}", param_hint="--key") from error
    if secret is None:
        raise click.BadParameter(f"{file} does not exist; give the file `key` of a router's folder", param_hint="--key")
    return RecordingKey(secret, hash_key)
