"""The command ``dualmap explain``."""

from pathlib import Path

import click

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
    metavar="FILE",
    help="Pool file (InferencePool as YAML). Repeat the option for several files.",
)
@click.option(
    "--request",
    required=True,
    metavar="FILE",
    help="File with the JSON body of the request. The value - stands for standard input. With --recording, the "
    "request's x-request-id.",
)
@click.option(
    "--header",
    "headers",
    multiple=True,
    metavar="NAME=VALUE",
    callback=_read_headers,
    help="Header of the request, such as the session header. Repeat the option for several headers.",
)
@click.option(
    "--recording",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="Explain a request of this recording (`dualmap router --record`), by what its router knew at that time.",
)
@click.option(
    "--key",
    "key_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Key of the recording's hashes.  [default: the file key of the folder --recording]",
)
@redis_options
@hash_key_option(default="the public key")
@click.option("--json", "as_json", is_flag=True, help="Print the decision as JSON instead of text.")
def explain(
    pool_files: tuple[Path, ...],
    request: str,
    headers: dict[str, str],
    recording: Path | None,
    key_file: Path | None,
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

    If the request's pool has a KV store (spec.kvStore), the command asks the store once, for at most one second. The
    candidates then have tokens to fetch. A store that is not asked or gives no answer is named with the reason.

    With --recording, the command prints which instance the recording's router chose for a past request, and what it
    knew about the candidates at that time.

    \b
    Example:
        echo '{"model": "qwen", "prompt": "Once upon a time"}' | dualmap explain --pool pool.yaml --request -
        dualmap explain --recording recording --request 0d3c1f5e-6d0c-4a59-8f0e-2f6d4f1f7c11
    """
    shared = redis_settings(redis, redis_password, redis_password_file, redis_ca)
    if recording is None:
        if key_file is not None:
            raise click.UsageError("--key needs --recording")
        if not pool_files:
            raise click.UsageError("Missing option '--pool' or '--recording'.")
        from dualmap_extproc.app.explain import explain_request

        body = click.File("rb").convert(request, None, click.get_current_context())
        explain_request(pool_files, body, headers, hash_key=hash_key, redis=shared, as_json=as_json)
        return
    if pool_files or headers or shared is not None:
        raise click.UsageError("--recording excludes --pool, --header and --redis: the recording has the decision")
    # Imported here because the encryption takes a tenth of a second to import, and --help does not need it.
    from dualmap_cli.explain.recorded import explain_recorded

    explain_recorded(recording, request, key_file=key_file, as_json=as_json)
