"""Parses ``--redis`` URLs and the related options, without the Redis library.

Messages never quote the URL, because it may contain a password.
"""

import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from dualmap_extproc.settings import RedisSettings

ACCEPTED: Final = "redis://[USER[:PASSWORD]@]HOST[:PORT][/DB], rediss:// likewise (TLS), or unix:///PATH[?db=DB]"


class RedisSettingsError(Exception):
    """An option for Redis is invalid; the message names the option and the accepted values, and contains no secret."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A Redis server and its credentials. ``path`` is the path of a Unix socket, empty for TCP."""

    host: str = ""
    port: int = 6379
    path: str = ""
    db: int = 0
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: bool = False
    ca_file: Path | None = None

    @property
    def shown(self) -> str:
        """The server's address in logs and messages."""
        if self.path:
            return f"unix://{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'rediss' if self.tls else 'redis'}://{host}:{self.port}"


def read_settings(url: str, *, password: str | None, password_file: Path | None, ca_file: Path | None) -> RedisSettings:
    """Return the settings from the options. Raises RedisSettingsError.

    A password file takes precedence over ``password``, and ``password`` takes precedence over the URL's password.
    """
    if password_file is not None:
        try:
            password = password_file.read_text().strip("\r\n")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
            raise RedisSettingsError(f"--redis-password-file: {password_file}: {reason}") from None
        if not password:
            raise RedisSettingsError(
                f"--redis-password-file: {password_file}: the file is empty; give a file with the password"
            )
    settings = RedisSettings(url=url, password=password or None, ca_file=ca_file)
    target = target_of(settings)
    if ca_file is not None:
        if not target.tls:
            raise RedisSettingsError("--redis-ca requires rediss://; give --redis rediss://... or omit --redis-ca")
        try:
            ssl.create_default_context(cafile=ca_file)
        except OSError as error:  # ssl.SSLError is an OSError
            reason = "no PEM certificates" if isinstance(error, ssl.SSLError) else error.strerror
            raise RedisSettingsError(f"--redis-ca: {ca_file}: {reason}; give a PEM file") from None
    return settings


def target_of(settings: RedisSettings) -> Target:
    """Return the server in ``settings``. Raises RedisSettingsError."""
    try:
        parts = urlsplit(settings.url)
        port = parts.port
    except ValueError:
        # The library's message quotes the invalid port. If the password contains a slash, this port is a piece of the
        # password.
        raise _refused("the text is not a URL, or the port is not a number (write / in a password as %2F)") from None
    password = settings.password or (unquote(parts.password) if parts.password else None)
    user = unquote(parts.username) if parts.username else None
    if parts.fragment:
        raise _refused("a URL with a fragment is not supported (write # in a password as %23)")
    if parts.scheme == "unix":
        if not parts.path or parts.hostname:
            raise _refused("the socket path is missing, or the URL has a host")
        return Target(path=unquote(parts.path), db=_unix_db(parts), user=user, password=password)
    if parts.scheme not in ("redis", "rediss"):
        raise _refused("the scheme is unknown")
    if not parts.hostname:
        raise _refused("the host is missing")
    if parts.query:
        raise _refused("a URL with a query is not supported")
    return Target(
        host=parts.hostname,
        port=6379 if port is None else port,
        db=_db(parts.path.removeprefix("/")),
        user=user,
        password=password,
        tls=parts.scheme == "rediss",
        ca_file=settings.ca_file,
    )


def _unix_db(parts: SplitResult) -> int:
    options = parse_qsl(parts.query, keep_blank_values=True)
    if any(name != "db" for name, _ in options):
        raise _refused("the query has options other than db")
    return _db(options[0][1]) if options else 0


def _db(text: str) -> int:
    if not text:
        return 0
    if not (text.isascii() and text.isdigit() and len(text) < 6):
        raise _refused("the database is not a number")
    return int(text)


def _refused(reason: str) -> RedisSettingsError:
    return RedisSettingsError(f"--redis: the URL is not accepted: {reason}; give {ACCEPTED}")
