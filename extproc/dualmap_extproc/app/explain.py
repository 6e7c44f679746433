"""``dualmap explain`` and ``dualmap policies``: print the decision for a request, and the list of policies.

The module ``explanation`` makes the decision.
"""

import json
import sys
from pathlib import Path
from typing import BinaryIO

import click

from dualmap.errors import PoolError
from dualmap.policies.registry import POLICIES
from dualmap.prompts.blocks import PUBLIC_KEY
from dualmap_extproc.app.hash_key import hash_key_option
from dualmap_extproc.store.options import redis_options, redis_settings


def _read_headers(_: click.Context, __: click.Parameter, given: tuple[str, ...]) -> dict[str, str]:
    headers = {}
    for text in given:
        name, separator, value = text.partition("=")
        if not name or not separator:
            raise click.BadParameter(f"{text!r} is not accepted; give NAME=VALUE")
        headers[name.strip().lower()] = value
    return headers


@click.command(short_help="Print which instance the router chooses for a request, and why.")
@click.option(
    "--pool",
    "pool_files",
    type=click.Path(path_type=Path),
    multiple=True,
    required=True,
    metavar="FILE",
    help="Pool file (InferencePool as YAML). Repeat the option for several files.",
)
@click.option(
    "--request",
    "request_file",
    type=click.File("rb"),
    required=True,
    metavar="FILE",
    help="File with the JSON body of the request. The value - stands for standard input.",
)
@click.option(
    "--header",
    "headers",
    multiple=True,
    metavar="NAME=VALUE",
    callback=_read_headers,
    help="Header of the request, such as the session header. Repeat the option for several headers.",
)
@redis_options
@hash_key_option(default="the public key")
@click.option("--json", "as_json", is_flag=True, help="Print the decision as JSON instead of text.")
def explain(
    pool_files: tuple[Path, ...],
    request_file: BinaryIO,
    headers: dict[str, str],
    redis: str | None,
    redis_password: str | None,
    redis_password_file: Path | None,
    redis_ca: Path | None,
    hash_key: bytes | None,
    as_json: bool,
) -> None:
    """Print which instance a newly started router chooses for a request, and why.

    With --redis, the command first reads the state that running routers share in Redis. A running router
    selects the same pair only if both have the same hash key.

    \b
    Example:
        echo '{"model": "qwen", "prompt": "Once upon a time"}' | dualmap explain --pool pool.yaml --request -
    """
    shared = redis_settings(redis, redis_password, redis_password_file, redis_ca)
    # These imports are here because gRPC and YAML take a second to import, and --help needs neither.
    from dualmap_extproc.app.explanation import decide, in_words
    from dualmap_extproc.errors import Refused
    from dualmap_extproc.pools.file import load_pool_files
    from dualmap_extproc.store.contract import StoreError

    try:
        pools, body = load_pool_files(pool_files), request_file.read()
        outcome = decide(pools, body, headers=headers, hash_key=hash_key or PUBLIC_KEY, redis=shared)
    except PoolError as error:
        click.echo(f"dualmap explain: {error}", err=True)
        sys.exit(2)
    except StoreError as error:
        click.echo(f"dualmap explain: --redis: cannot read shared state: {error}", err=True)
        sys.exit(1)
    if isinstance(outcome, Refused):
        click.echo(f"dualmap explain: the router would answer {outcome.status}: {outcome.message}", err=True)
        sys.exit(1 if outcome.status >= 500 else 2)
    click.echo(json.dumps(outcome.as_json(), indent=2) if as_json else in_words(outcome, pools))
    for pool in pools:
        tokenizer = pool.engine.tokenizer
        if pool.id == outcome.pool and tokenizer.path and not (Path(tokenizer.path) / "tokenizer.json").is_file():
            click.echo(
                f"dualmap explain: {tokenizer.path} contains no tokenizer.json on this machine. A router with this "
                "pool file does not start without it.",
                err=True,
            )


@click.command(short_help="List every routing policy with its paper or project.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list instead of a table.")
def policies(as_json: bool) -> None:
    """List every routing policy with its paper or project, one per line.

    \b
    Example:
        dualmap policies --json
    """
    if as_json:
        rows = [{"name": each.name, "summary": each.summary, "source": each.source} for each in POLICIES.values()]
        click.echo(json.dumps(rows, indent=2))
        return
    width = max(len(name) for name in POLICIES)
    for policy in POLICIES.values():
        click.echo(f"{policy.name:<{width}}  {policy.summary} [{policy.source}]")
