"""``dualmap tokenize``: prints the number of tokens of a request, and compares the ids with an engine's."""

import json
import sys
from pathlib import Path
from typing import BinaryIO

import click

from dualmap.errors import PoolError


@click.command(short_help="Print the token count of a request, and compare the ids with an engine's.")
@click.option(
    "--pool",
    "pool_file",
    type=click.Path(path_type=Path),
    required=True,
    metavar="FILE",
    help="Pool file (InferencePool as YAML) with spec.engine.tokenizer.",
)
@click.option(
    "--request",
    "request_file",
    type=click.File("rb"),
    required=True,
    metavar="FILE",
    help="File with the JSON body of the request. The value - stands for standard input.",
)
@click.option("--engine", metavar="URL", help="Engine such as http://10.0.0.1:8000, whose own ids are compared.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON instead of text.")
def tokenize(pool_file: Path, request_file: BinaryIO, engine: str | None, as_json: bool) -> None:
    """Print the token count of a request, the time it took, and how much came from the cache of prefixes.

    With --engine, the exit status is 1 if the engine's ids differ, and the output shows the first difference.

    \b
    Example:
        dualmap tokenize --pool pool.yaml --request request.json --engine http://10.0.0.1:8000
    """
    # These imports are here because aiohttp and the tokenizer take a second to import, and --help needs neither.
    from dualmap_extproc.pools.file import load_pool_files
    from dualmap_extproc.tokens.check import check, in_words
    from dualmap_extproc.tokens.messages import UnsupportedRequest
    from dualmap_extproc.tokens.rendering import TokenizerError

    try:
        checked = check(load_pool_files([pool_file]), request_file.read(), engine)
    except (PoolError, TokenizerError, UnsupportedRequest) as error:
        click.echo(f"dualmap tokenize: {error}", err=True)
        sys.exit(2)
    click.echo(json.dumps(checked.as_json(), indent=2) if as_json else in_words(checked))
    if checked.engine_ids is not None and checked.first_difference is not None:
        sys.exit(1)
