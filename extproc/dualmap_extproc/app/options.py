"""Options that several programs share."""

from collections.abc import Callable
from typing import Any, TypeVar, get_args

import click

from dualmap_extproc.settings import Transport

_Command = TypeVar("_Command", bound=Callable[..., Any])


def transport_option(command: _Command) -> _Command:
    """Add ``--transport`` to a command."""
    return click.option(
        "--transport",
        default="grpc",
        type=click.Choice(get_args(Transport)),
        help="What serves --grpc-port: the router's own HTTP/2 server (h2), or grpc.aio. Both behave alike.",
    )(command)
