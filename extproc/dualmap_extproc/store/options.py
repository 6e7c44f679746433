"""The command line's options for Redis, which ``dualmap router`` and ``dualmap explain`` share."""

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
    """Add the options to a command, whose values go to ``redis_settings``."""
    options = (
        click.option("--redis", metavar="URL", help="State shared with other routers: redis://, rediss:// or unix://."),
        click.option(
            "--redis-password-file",
            type=click.Path(path_type=Path),
            metavar="FILE",
            help=f"Holds Redis's password; {PASSWORD_VARIABLE} in the environment does as well.",
        ),
        click.option(
            "--redis-ca",
            type=click.Path(path_type=Path),
            metavar="FILE",
            help="What a rediss:// server's certificate is checked against, as PEM. [default: the system's]",
        ),
        # There to be read from the environment, as click does it.
        click.option("--redis-password", envvar=PASSWORD_VARIABLE, hidden=True, callback=_not_on_the_command_line),
    )
    for option in reversed(options):
        function = option(function)
    return function


def redis_settings(
    redis: str | None, redis_password: str | None, redis_password_file: Path | None, redis_ca: Path | None
) -> RedisSettings | None:
    """Return the settings that the options describe; None without ``--redis``. Raises click.UsageError."""
    if redis is None:
        for name, value in (("--redis-password-file", redis_password_file), ("--redis-ca", redis_ca)):
            if value is not None:
                raise click.UsageError(f"{name} means nothing without --redis; give --redis URL too")
        return None
    try:
        return read_settings(redis, password=redis_password, password_file=redis_password_file, ca_file=redis_ca)
    except RedisSettingsError as error:
        raise click.UsageError(str(error)) from None


def _not_on_the_command_line(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    if parameter.name and context.get_parameter_source(parameter.name) is ParameterSource.COMMANDLINE:
        raise click.UsageError(
            "a password in the command line can be read by every user of this machine; "
            f"give --redis-password-file FILE, or {PASSWORD_VARIABLE} in the environment"
        )
    return value
