"""Converts ended requests and changes of pools to lines of JSON."""

import orjson

from dualmap.receipt import CandidateReceipt, Receipt
from dualmap.recordings.fields import SECONDS_MAX
from dualmap.recordings.lines import encode_line, line_fields
from dualmap.recordings.values import Line, RecordedReceipt, RecordedRequest
from dualmap.requests import Usage
from dualmap_extproc.recording.hashing import KeyedHashes, Purpose
from dualmap_extproc.recording.requests import OpenRequest


def encoded(line: Line) -> bytes:
    """Return the line of a value, with its line break."""
    try:
        return orjson.dumps(line_fields(line), option=orjson.OPT_APPEND_NEWLINE)
    except TypeError:
        # orjson accepts no lone surrogates, which a name of a model may have.
        return encode_line(line).encode()


def recorded(ended: OpenRequest, hashes: KeyedHashes, offset_s: float) -> RecordedRequest:
    """Return a request as it is recorded.

    ``offset_s`` is the time since the epoch at which the request's clock is 0.
    """
    request, entry = ended.request, ended.entry
    chain = request.chain
    usage = None if entry is None else entry.usage
    return RecordedRequest(
        arrived_s=round(request.arrived_s + offset_s, 6),
        pool=ended.pool,
        model=request.model,
        streamed=request.streamed,
        prompt_tokens=chain.tokens,
        block_tokens=chain.block_tokens,
        blocks=hashes.keyed(chain.hashes, Purpose.BLOCK),
        outcome=ended.outcome,
        full_blocks=chain.full_blocks,
        exact=chain.exact,
        adapter=request.adapter,
        priority=request.priority,
        sequences=request.sequences,
        session=None if request.session is None else hashes.one(request.session, Purpose.SESSION),
        client=hashes.one(request.client, Purpose.CLIENT) if request.client else None,
        request=hashes.text(ended.request_name, Purpose.REQUEST) if ended.request_name else None,
        receipt=None if ended.receipt is None else _receipt(ended.receipt),
        code=ended.refusal,
        served=ended.served,
        attempts=None if entry is None else entry.attempts,
        queued_s=_rounded(ended.queued_s),
        ttft_s=_rounded(ended.ttft_s),
        duration_s=_rounded(ended.duration_s),
        engine_prompt_tokens=None if usage is None else usage.prompt_tokens,
        output_tokens=None if usage is None else usage.completion_tokens,
        cached_tokens=_cached_tokens(usage),
        comparable=request.comparable,
    )


def _cached_tokens(usage: Usage | None) -> int | None:
    """Return the engine's count; None if it contradicts the engine's count of the whole prompt."""
    if usage is None or usage.cached_tokens is None:
        return None
    is_possible = usage.prompt_tokens is None or usage.cached_tokens <= usage.prompt_tokens
    return usage.cached_tokens if is_possible else None


def _receipt(receipt: Receipt) -> RecordedReceipt:
    prefill = receipt.prefill
    compared = {receipt.chosen, *receipt.pair}
    return RecordedReceipt(
        policy=receipt.policy,
        rule=receipt.rule,
        pair=receipt.pair,
        chosen=receipt.chosen,
        prompt_tokens=receipt.prompt_tokens,
        matched_tokens=receipt.matched_tokens,
        key_blocks=receipt.key.blocks,
        key_tokens=receipt.key.tokens,
        predicted_ttft_s=_bounded(receipt.predicted_ttft_s),
        source=receipt.source,
        fetch_tokens=receipt.fetch_tokens,
        moved_from=receipt.moved_from,
        prefill="" if prefill is None else prefill.where,
        prefiller="" if prefill is None or prefill.receipt is None else prefill.receipt.chosen,
        candidates=tuple(map(_candidate, (each for each in receipt.candidates if each.id in compared))),
    )


def _candidate(candidate: CandidateReceipt) -> CandidateReceipt:
    return candidate._replace(ttft_s=_bounded(candidate.ttft_s))


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else _bounded(seconds)


def _bounded(seconds: float) -> float:
    """Return seconds as the format has them: in microseconds, not negative, and finite."""
    return round(min(max(seconds, 0.0), SECONDS_MAX), 6)
