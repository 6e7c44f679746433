"""``dualmap explain`` and ``dualmap policies``: a decision in words, and the rules there are to decide by.

The request walks the very path it would walk in a router: the same Picker, over routers that have seen nothing yet.
"""

import sys
from pathlib import Path
from typing import BinaryIO

import click
import orjson

from dualmap.errors import PoolError
from dualmap.policies import POLICIES
from dualmap.pool import Pool
from dualmap.receipt import Receipt
from dualmap.requests import Completion, Decision, FirstToken
from dualmap_extproc.errors import Refused
from dualmap_extproc.picker import Picker
from dualmap_extproc.pools.file import load_pool_files
from dualmap_extproc.settings import Limits


class _Recorder:
    """An observer that keeps the one decision it is told of."""

    def __init__(self) -> None:
        self.decision: Decision | None = None

    def routed(self, pool: str, decision: Decision) -> None:
        self.decision = decision

    def routed_bodiless(self, pool: str) -> None: ...

    def refused(self, refused: Refused) -> None: ...

    def decided(self, seconds: float) -> None: ...

    def first_token(self, pool: str, first_token: FirstToken) -> None: ...

    def finished(self, pool: str, completion: Completion) -> None: ...

    def aborted(self, pool: str, completion: Completion) -> None: ...

    def expired(self, pool: str, completion: Completion) -> None: ...

    def measured(self, pool: str, completion: Completion) -> None: ...

    def served_elsewhere(self, pool: str) -> None: ...


def decide(pools: tuple[Pool, ...], body: bytes) -> Receipt | Refused:
    """Return the receipt a router that has just started would give a request body."""
    recorder = _Recorder()
    picker = Picker(Limits(), recorder, id_prefix="explain")
    picker.set_pools(0.0, pools)
    outcome = picker.pick(0.0, body, None, 0.0)
    if isinstance(outcome, Refused):
        return outcome
    assert recorder.decision is not None, "a pick is always reported"
    return recorder.decision.receipt


def in_words(receipt: Receipt) -> str:
    """Return a receipt as a short text for people."""
    key = receipt.key
    lines = [
        f"{receipt.chosen} ({receipt.address}) gets this request of pool {receipt.pool}.",
        f"Because {receipt.reason} (policy {receipt.policy}, rule {receipt.rule}).",
        f"Key: {key.blocks} blocks, {key.tokens} of the prompt's {receipt.prompt_tokens} tokens ({key.hash:016x}).",
        f"Pair: {' and '.join(receipt.pair)}, by ring 1 and ring 2.",
        "Candidates:",
    ]
    for each in receipt.candidates:
        lines += [
            f"  {each.id} ({each.state}): holds {each.matched_tokens} tokens of the prompt,",
            f"    {each.pending_tokens} prefill tokens pending, {each.in_flight} requests in flight;"
            f" predicted TTFT {each.ttft_s:.3f} s",
        ]
    return "\n".join(lines)


@click.command(short_help="Say which instance a request would go to, and why.")
@click.option(
    "--pool",
    "pool_files",
    type=click.Path(path_type=Path),
    multiple=True,
    required=True,
    metavar="FILE",
    help="A pool file; repeat for several.",
)
@click.option(
    "--request",
    "request_file",
    type=click.File("rb"),
    required=True,
    metavar="FILE",
    help="The request's JSON body; - reads standard input.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the receipt as JSON instead of words.")
def explain(pool_files: tuple[Path, ...], request_file: BinaryIO, as_json: bool) -> None:
    """Say which instance a request would go to on a router that has just started, and why.

    \b
    Example:
        echo '{"model": "qwen", "prompt": "Once upon a time"}' | dualmap explain --pool pool.yaml --request -
    """
    try:
        outcome = decide(load_pool_files(pool_files), request_file.read())
    except PoolError as error:
        click.echo(f"dualmap explain: {error}", err=True)
        sys.exit(2)
    if isinstance(outcome, Refused):
        click.echo(f"dualmap explain: the router would answer {outcome.status}: {outcome.message}", err=True)
        sys.exit(1 if outcome.status >= 500 else 2)
    click.echo(orjson.dumps(outcome.as_json(), option=orjson.OPT_INDENT_2).decode() if as_json else in_words(outcome))


@click.command(short_help="List every routing policy with its source.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list instead of a table.")
def policies(as_json: bool) -> None:
    """List every routing policy, one line each with its source.

    \b
    Example:
        dualmap policies --json
    """
    if as_json:
        rows = [{"name": each.name, "summary": each.summary, "source": each.source} for each in POLICIES.values()]
        click.echo(orjson.dumps(rows, option=orjson.OPT_INDENT_2).decode())
        return
    width = max(len(name) for name in POLICIES)
    for policy in POLICIES.values():
        click.echo(f"{policy.name:<{width}}  {policy.summary} [{policy.source}]")
