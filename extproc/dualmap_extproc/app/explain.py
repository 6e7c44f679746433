"""Prints the decision for a request, for ``dualmap explain``, and the list of policies, for ``dualmap policies``.

The module ``explanation`` makes the decision. ``dualmap_cli.explain`` has the options of ``dualmap explain``.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import click

from dualmap.errors import PoolError
from dualmap.policies.registry import POLICIES
from dualmap.prompts.blocks import PUBLIC_KEY
from dualmap_extproc.settings import RedisSettings


def explain_request(
    pool_files: tuple[Path, ...],
    request_file: IO[bytes],
    headers: Mapping[str, str],
    *,
    hash_key: bytes | None,
    redis: RedisSettings | None,
    as_json: bool,
) -> None:
    """Print which instance a newly started router chooses for a request, and why; exit with 1 or 2 after an error."""
    # These imports are here because gRPC and YAML take a second to import, and --help needs neither.
    from dualmap_extproc.app.explanation import decide, in_words
    from dualmap_extproc.errors import Refused
    from dualmap_extproc.pools.file import load_pool_files
    from dualmap_extproc.store.contract import StoreError

    try:
        pools, body = load_pool_files(pool_files), request_file.read()
        outcome = decide(pools, body, headers=headers, hash_key=hash_key or PUBLIC_KEY, redis=redis)
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
        path = pool.engine.tokenizer.path
        if pool.id == outcome.receipt.pool and path and not (Path(path) / "tokenizer.json").is_file():
            click.echo(
                f"dualmap explain: {path} contains no tokenizer.json on this machine. A router with this "
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
