"""The option ``--hash-key-file`` of the commands that hash prompts, and the key of clients' names made from it."""

import secrets
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from dualmap.prompts.blocks import PUBLIC_KEY

_SHORTEST_BYTES: Final = 16
_ADVICE: Final = f"give a file with at least {_SHORTEST_BYTES} random bytes, such as from: openssl rand -hex 32"

_Function = TypeVar("_Function", bound=Callable[..., Any])


def hash_key_option(default: str) -> Callable[[_Function], _Function]:
    """Return a decorator that adds the option; the command receives the key, or None, as ``hash_key``.

    ``default`` describes the key without the option.
    """
    return click.option(
        "--hash-key-file",
        "hash_key",
        type=click.Path(path_type=Path),
        metavar="FILE",
        callback=_read,
        show_default=default,
        help=f"Secret key of the prompts' hashes, at least {_SHORTEST_BYTES} bytes; the same for all routers.",
    )


def client_key(hash_key: bytes) -> bytes:
    """Return the key of the hashes of clients' names: the same for all routers with the same secret hash key."""
    if hash_key == PUBLIC_KEY:
        return secrets.token_bytes(32)
    return blake2b(key=hash_key, person=b"dualmap clients", digest_size=32).digest()


def _read(context: click.Context, parameter: click.Parameter, file: Path | None) -> bytes | None:
    """Return the key from a file, without line breaks at its ends. Raises BadParameter."""
    if file is None:
        return None
    try:
        secret = file.read_bytes().strip(b"\r\n")
    except OSError as error:
        raise click.BadParameter(f"{file}: {error.strerror}; {_ADVICE}", context, parameter) from None
    if len(secret) < _SHORTEST_BYTES:
        raise click.BadParameter(f"{file}: has only {len(secret)} bytes; {_ADVICE}", context, parameter)
    # A key of BLAKE2b has at most 64 bytes.
    return blake2b(secret, digest_size=32).digest()
