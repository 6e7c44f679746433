"""The command line options for Redis, shared by ``dualmap router`` and ``dualmap explain``."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import click
from click.core import ParameterSource

from dualmap_extproc.settings import RedisSettings
from dualmap_extproc.store.target import RedisSettingsError, read_settings

PASSWORD_VARIABLE: Final = "DUALMAP_REDIS_PASSWORD"

_Function = TypeVar("_Function", bound=Callable[..., Any])


def redis_options(function: _Function) -> _Function:
    """Add the options to a command; the command must pass their values to ``redis_settings``."""
    options = (
        click.option(
            "--redis",
            metavar="URL",
            help="Redis through which routers share state. The URL starts with redis://, rediss:// or unix://.",
        ),
        click.option(
            "--redis-password-file",
            type=click.Path(path_type=Path),
            metavar="FILE",
            help="File with the Redis password. "
            f"The environment variable {PASSWORD_VARIABLE} can contain the password instead.",
        ),
        click.option(
            "--redis-ca",
            type=click.Path(path_type=Path),
            metavar="FILE",
            help="CA certificates that verify a rediss:// server, as PEM. [default: the system's]",
        ),
        # The option is hidden, because click must read the password only from the environment.
        click.option("--redis-password", envvar=PASSWORD_VARIABLE, hidden=True, callback=_not_on_the_command_line),
    )
    for option in reversed(options):
        function = option(function)
    return function


def redis_settings(
    redis: str | None, redis_password: str | None, redis_password_file: Path | None, redis_ca: Path | None
) -> RedisSettings | None:
    """Return the settings from the options, or None without ``--redis``. Raises click.UsageError."""
    if redis is None:
        for name, value in (("--redis-password-file", redis_password_file), ("--redis-ca", redis_ca)):
            if value is not None:
                raise click.UsageError(f"{name} requires --redis; give --redis URL too")
        return None
    try:
        return read_settings(redis, password=redis_password, password_file=redis_password_file, ca_file=redis_ca)
    except RedisSettingsError as error:
        raise click.UsageError(str(error)) from None


def _not_on_the_command_line(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    if parameter.name and context.get_parameter_source(parameter.name) is ParameterSource.COMMANDLINE:
        raise click.UsageError(
            "other users of this machine can read a password on the command line; "
            f"give --redis-password-file FILE or the environment variable {PASSWORD_VARIABLE}"
        )
    return value
