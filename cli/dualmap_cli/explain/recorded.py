"""Explains a recorded request by its line: the decision, what the router knew of the candidates, and how it went."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click

from dualmap.policies.registry import POLICIES
from dualmap.recordings.lines import line_fields
from dualmap.recordings.values import RecordedReceipt, RecordedRequest
from dualmap_cli.running import command_errors, writing_results
from dualmap_cli.trace.keys import recording_key
from dualmap_cli.trace.warnings import warn
from dualmap_sim.recordings.errors import RecordingError
from dualmap_sim.recordings.reader import Reading

_KEY_FILE: Final = "key"


def explain_recorded(path: Path, request_id: str, *, key_file: Path | None, as_json: bool) -> None:
    """Print why a recorded request went where it went; exit with 1 if the recording does not contain it."""
    with command_errors("explain"):
        if key_file is None and path.is_dir():
            key_file = path / _KEY_FILE
        if key_file is None:
            raise click.UsageError("--recording is a file, so give --key with the file key of a router's folder")
        wanted = recording_key(key_file, None).request(request_id)
        try:
            reading = Reading([path])
            found = [each for each in reading.requests() if each.request == wanted]
        except RecordingError as error:
            click.echo(f"dualmap explain: {error}", err=True)
            sys.exit(2)
        warn(reading)
        if not found:
            click.echo(
                f"dualmap explain: the recording has no request with x-request-id {request_id}; it may not be "
                "recorded, or have been recorded with another key",
                err=True,
            )
            sys.exit(1)
        with writing_results():
            if as_json:
                click.echo(json.dumps([line_fields(each) for each in found], indent=2))
            else:
                click.echo("\n\n".join("\n".join(_lines(each)) for each in found))


def _lines(request: RecordedRequest) -> Iterator[str]:
    receipt = request.receipt
    if receipt is None:
        yield f"No instance got this request of pool {request.pool}: the router answered {request.code}."
        return
    yield f"{receipt.chosen} got this request of pool {request.pool}."
    yield from _decision(receipt)
    yield _outcome(request)


def _decision(receipt: RecordedReceipt) -> Iterator[str]:
    policy = POLICIES.get(receipt.policy)
    summary = f": {policy.summary}" if policy is not None else ""
    yield f"Rule: {receipt.rule} of the policy {receipt.policy}{summary}."
    yield f"Key: {receipt.key_blocks} blocks of the prompt, {receipt.key_tokens:,} of {receipt.prompt_tokens:,} tokens."
    yield f"Pair: {' and '.join(receipt.pair)}, by ring 1 and ring 2."
    if receipt.moved_from:
        yield f"Session: moved from {receipt.moved_from} to {receipt.chosen}."
    if receipt.prefill:
        where = f"at {receipt.prefiller}" if receipt.prefiller else f"at {receipt.chosen}, because of {receipt.prefill}"
        yield f"Prefill: {where}."
    yield f"Tokens that {receipt.chosen} held: {receipt.matched_tokens:,}, known from {receipt.source}."
    yield "Candidates at that time:"
    for each in receipt.candidates:
        fetch = f", would fetch {each.fetch_tokens:,}" if each.fetch_tokens else ""
        yield (
            f"  {each.id} ({each.state}): held {each.matched_tokens:,} tokens of the prompt{fetch}; "
            f"{each.pending_tokens:,} prefill tokens pending, {each.in_flight} in flight; "
            f"predicted TTFT {each.ttft_s:.3f} s"
        )


def _outcome(request: RecordedRequest) -> str:
    parts = [f"Outcome: {request.outcome}"]
    if request.queued_s is not None:
        parts.append(f"queued for {request.queued_s:.3f} s")
    if request.ttft_s is not None:
        predicted = "" if request.receipt is None else f" (predicted {request.receipt.predicted_ttft_s:.3f} s)"
        parts.append(f"first token after {request.ttft_s:.3f} s{predicted}")
    if request.duration_s is not None:
        parts.append(f"end after {request.duration_s:.3f} s")
    if request.cached_tokens is not None:
        parts.append(f"the engine had {request.cached_tokens:,} tokens cached")
    if request.served:
        parts.append(f"served by {request.served}")
    return ", ".join(parts) + "."
