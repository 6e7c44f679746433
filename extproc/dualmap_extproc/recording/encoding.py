"""Converts ended requests and changes of pools to lines of JSON.

Requests are converted directly, because a value of ``dualmap.recordings`` and its fields take twice the time.
"""

from collections.abc import Iterator, Sequence

import orjson

from dualmap.receipt import CandidateReceipt, Receipt
from dualmap.recordings.fields import SECONDS_MAX
from dualmap.recordings.lines import encode_fields, line_fields
from dualmap.recordings.values import Line
from dualmap_extproc.recording.hashing import HashDigits, KeyedHashes, Purpose, text_hash
from dualmap_extproc.recording.requests import OpenRequest


def encoded(line: Line) -> bytes:
    """Return the line of a value, with its line break."""
    return _encoded(line_fields(line))


def encoded_requests(requests: Sequence[OpenRequest], hashes: KeyedHashes, offset_s: float) -> Iterator[bytes]:
    """Yield the lines of ended requests, each with its line break.

    ``offset_s`` is the time since the epoch at which the requests' clock is 0.
    """
    digits = HashDigits(hashes)
    for each in requests:
        request = each.request
        digits.add(request.chain.hashes, Purpose.BLOCK)
        if request.session is not None:
            digits.add((request.session,), Purpose.SESSION)
        if request.client:
            digits.add((request.client,), Purpose.CLIENT)
        if each.request_name:
            digits.add((text_hash(each.request_name),), Purpose.REQUEST)
    for each in requests:
        yield _encoded(_fields(each, digits, offset_s))


def _encoded(fields: dict[str, object]) -> bytes:
    try:
        return orjson.dumps(fields, option=orjson.OPT_APPEND_NEWLINE)
    except TypeError:
        # orjson accepts no lone surrogates, which a name of a model may have.
        return encode_fields(fields).encode()


def _fields(ended: OpenRequest, digits: HashDigits, offset_s: float) -> dict[str, object]:
    """Return the fields of a request's line, in the order of ``RecordedRequest`` and without defaults."""
    request, chain = ended.request, ended.request.chain
    fields: dict[str, object] = {
        "kind": "request",
        "arrived_s": round(request.arrived_s + offset_s, 6),
        "pool": ended.pool,
        "model": request.model,
        "streamed": request.streamed,
        "prompt_tokens": chain.tokens,
        "block_tokens": chain.block_tokens,
        "blocks": digits.take(len(chain.hashes)),
        "outcome": ended.outcome,
    }
    if chain.full_blocks is not None:
        fields["full_blocks"] = chain.full_blocks
    if chain.exact:
        fields["exact"] = True
    if request.adapter:
        fields["adapter"] = request.adapter
    if request.priority:
        fields["priority"] = request.priority
    if request.sequences != 1:
        fields["sequences"] = request.sequences
    if request.session is not None:
        fields["session"] = digits.take()
    if request.client:
        fields["client"] = digits.take()
    if ended.request_name:
        fields["request"] = digits.take()
    if ended.receipt is not None:
        fields["receipt"] = _receipt(ended.receipt)
    _add_end(fields, ended)
    return fields


def _add_end(fields: dict[str, object], ended: OpenRequest) -> None:
    """Add what is known from the end of a request."""
    entry = ended.entry
    usage = None if entry is None else entry.usage
    if ended.refusal:
        fields["code"] = ended.refusal
    if ended.served:
        fields["served"] = ended.served
    if entry is not None and entry.attempts is not None:
        fields["attempts"] = entry.attempts
    for name, seconds in (("queued_s", ended.queued_s), ("ttft_s", ended.ttft_s), ("duration_s", ended.duration_s)):
        if seconds is not None:
            fields[name] = _bounded(seconds)
    if usage is not None:
        if usage.prompt_tokens is not None:
            fields["engine_prompt_tokens"] = usage.prompt_tokens
        if usage.completion_tokens is not None:
            fields["output_tokens"] = usage.completion_tokens
        if usage.cached_tokens is not None and _is_possible(usage.cached_tokens, usage.prompt_tokens):
            fields["cached_tokens"] = usage.cached_tokens
    if not ended.request.comparable:
        fields["comparable"] = False


def _is_possible(cached_tokens: int, prompt_tokens: int | None) -> bool:
    """Return whether the engine's count of cached tokens agrees with its count of the whole prompt."""
    return prompt_tokens is None or cached_tokens <= prompt_tokens


def _receipt(receipt: Receipt) -> dict[str, object]:
    prefill, chosen, pair = receipt.prefill, receipt.chosen, receipt.pair
    fields: dict[str, object] = {
        "policy": receipt.policy,
        "rule": receipt.rule,
        "pair": pair,
        "chosen": chosen,
        "prompt_tokens": receipt.prompt_tokens,
        "matched_tokens": receipt.matched_tokens,
        "key_blocks": receipt.key.blocks,
        "key_tokens": receipt.key.tokens,
        "predicted_ttft_s": _bounded(receipt.predicted_ttft_s),
    }
    if receipt.source != "records":
        fields["source"] = receipt.source
    if receipt.fetch_tokens is not None:
        fields["fetch_tokens"] = receipt.fetch_tokens
    if receipt.moved_from:
        fields["moved_from"] = receipt.moved_from
    if prefill is not None:
        fields["prefill"] = prefill.where
        if prefill.receipt is not None:
            fields["prefiller"] = prefill.receipt.chosen
    candidates = [_candidate(each) for each in receipt.candidates if each.id == chosen or each.id in pair]
    if candidates:
        fields["candidates"] = candidates
    return fields


def _candidate(candidate: CandidateReceipt) -> dict[str, object]:
    fields: dict[str, object] = {
        "id": candidate.id,
        "state": candidate.state,
        "matched_tokens": candidate.matched_tokens,
        "pending_tokens": candidate.pending_tokens,
        "in_flight": candidate.in_flight,
        "ttft_s": _bounded(candidate.ttft_s),
    }
    if candidate.fetch_tokens:
        fields["fetch_tokens"] = candidate.fetch_tokens
    return fields


def _bounded(seconds: float) -> float:
    """Return seconds as the format has them: in microseconds, not negative, and finite."""
    # Comparisons instead of min and max, for speed: a request has up to seven times.
    if seconds < 0.0:
        return 0.0
    return round(seconds if seconds < SECONDS_MAX else SECONDS_MAX, 6)
