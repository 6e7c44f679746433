"""Converts each value of a recording to a JSON line, and lines to values or to an error that says what is wrong."""

import json
from collections.abc import Callable, Mapping
from struct import pack
from typing import Any, Final, Never, assert_never

from dualmap.prompts.blocks import MAX_BLOCKS
from dualmap.receipt import CandidateReceipt
from dualmap.recordings.errors import CutOffLine, ForeignVersion, InvalidField, InvalidLine
from dualmap.recordings.fields import EPOCH_S_MAX, TOKENS_MAX, Fields
from dualmap.recordings.pools import pool_fields, read_pool
from dualmap.recordings.values import (
    VERSION,
    Header,
    Line,
    Missing,
    PoolChanged,
    PoolRemoved,
    RecordedOutcome,
    RecordedReceipt,
    RecordedRequest,
)

# The names of the fields, and the values with which lines leave them out. No value equals _REQUIRED.
_REQUIRED: Final = object()
_DEFAULTS: Final[Mapping[type, tuple[tuple[str, object], ...]]] = {
    kind: tuple((name, kind._field_defaults.get(name, _REQUIRED)) for name in kind._fields)
    for kind in (RecordedRequest, RecordedReceipt, CandidateReceipt)
}
_HASHES: Final = ("session", "client", "request")
_PRIORITY_MAX: Final = 2**31


def line_fields(line: Line) -> dict[str, object]:
    """Return a value as JSON values. Fields of a request that have their defaults are left out."""
    match line:
        case RecordedRequest():
            return _request_fields(line)
        case PoolChanged():
            return {"kind": "pool", "at_s": line.at_s, "pool": pool_fields(line.pool)}
        case PoolRemoved():
            return {"kind": "pool_removed", "at_s": line.at_s, "pool": line.pool}
        case Missing():
            return {"kind": "missing", **line._asdict()}
        case Header():
            return {"kind": "recording", "version": VERSION, **line._asdict()}
        case _:
            assert_never(line)


def encode_line(line: Line) -> str:
    """Return a value as one line of JSON in ASCII, with its line break."""
    return encode_fields(line_fields(line))


def encode_fields(fields: Mapping[str, object]) -> str:
    """Return the fields of a line as JSON in ASCII, with its line break."""
    return json.dumps(fields, separators=(",", ":"), allow_nan=False) + "\n"


def decode_line(text: str) -> Line:
    """Return the value of a line; unknown fields are ignored.

    Raises CutOffLine, InvalidLine, InvalidField, or for a first line ForeignVersion.
    """
    fields = Fields(_parsed(text))
    kind = fields.raw.get("kind")
    reader = _READERS.get(kind) if isinstance(kind, str) else None
    if reader is None:
        raise InvalidLine(f"the line has no kind of {', '.join(_READERS)}")
    return reader(fields)


def _parsed(text: str) -> Mapping[str, object]:
    try:
        parsed = json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        ends_early = text.startswith("{") and not text.rstrip().endswith("}")
        raise CutOffLine() if ends_early else InvalidLine(f"the line is no JSON: {error.msg}") from None
    except _NotFinite as error:
        raise InvalidLine(f"the line is no JSON: {error} is no number of JSON") from None
    except (ValueError, RecursionError):
        raise InvalidLine("the line is no JSON: a number is too long, or values are nested too deeply") from None
    if not isinstance(parsed, dict):
        raise InvalidLine("the line is no JSON object")
    return parsed


class _NotFinite(ValueError):
    """Python's parser found NaN or an infinite number, which JSON does not have."""


def _refuse_constant(name: str) -> Never:
    raise _NotFinite(name)


def _changed(value: Any) -> dict[str, Any]:
    """Return the fields of a named tuple that differ from their defaults."""
    named = zip(_DEFAULTS[type(value)], value, strict=True)
    return {name: each for (name, default), each in named if each != default}


def _request_fields(request: RecordedRequest) -> dict[str, object]:
    fields = {"kind": "request", **_changed(request)}
    fields["blocks"] = pack(f">{len(request.blocks)}Q", *request.blocks).hex()
    for name in _HASHES:
        if name in fields:
            fields[name] = f"{fields[name]:016x}"
    if request.receipt is not None:
        receipt = _changed(request.receipt)
        if request.receipt.candidates:
            receipt["candidates"] = [_changed(each) for each in request.receipt.candidates]
        fields["receipt"] = receipt
    return fields


def _read_header(fields: Fields) -> Header:
    version = fields.integer("version", low=1)
    if version != VERSION:
        raise ForeignVersion(version, VERSION)
    sample = fields.number("sample", high=1.0)
    if sample == 0.0:
        raise InvalidField("sample", sample, "a share above 0 and at most 1")
    return Header(
        router=fields.text("router"),
        started_s=fields.number("started_s", high=EPOCH_S_MAX),
        key=fields.text("key"),
        sample=sample,
        program=fields.text("program", ""),
    )


def _read_request(fields: Fields) -> RecordedRequest:
    receipt = fields.sub("receipt")
    request = RecordedRequest(
        arrived_s=fields.number("arrived_s", high=EPOCH_S_MAX),
        pool=fields.text("pool"),
        model=fields.text("model", ""),
        streamed=fields.flag("streamed"),
        prompt_tokens=fields.integer("prompt_tokens"),
        block_tokens=fields.integer("block_tokens", low=1),
        blocks=fields.hashes("blocks", most=MAX_BLOCKS),
        outcome=fields.name("outcome", RecordedOutcome),
        full_blocks=fields.optional_integer("full_blocks"),
        exact=fields.flag("exact", default=False),
        adapter=fields.text("adapter", ""),
        priority=fields.integer("priority", 0, low=-_PRIORITY_MAX, high=_PRIORITY_MAX),
        sequences=fields.integer("sequences", 1, low=1),
        session=fields.hash("session"),
        client=fields.hash("client"),
        request=fields.hash("request"),
        receipt=None if receipt is None else _read_receipt(receipt),
        code=fields.text("code", ""),
        served=fields.text("served", ""),
        attempts=fields.optional_integer("attempts"),
        queued_s=fields.optional_number("queued_s"),
        ttft_s=fields.optional_number("ttft_s"),
        duration_s=fields.optional_number("duration_s"),
        engine_prompt_tokens=fields.optional_integer("engine_prompt_tokens"),
        output_tokens=fields.optional_integer("output_tokens"),
        cached_tokens=fields.optional_integer("cached_tokens"),
        comparable=fields.flag("comparable", default=True),
    )
    _check_counts(request)
    return request


def _check_counts(request: RecordedRequest) -> None:
    """Check that the counts of tokens and of blocks agree. Raises InvalidField.

    Routers hash the first MAX_BLOCKS blocks of a prompt only.
    """
    engines_count = request.engine_prompt_tokens
    if engines_count is not None and (request.cached_tokens or 0) > engines_count:
        raise InvalidField("cached_tokens", request.cached_tokens, f"at most engine_prompt_tokens, {engines_count}")
    blocks, length, full_blocks = len(request.blocks), request.block_tokens, request.full_blocks
    cut = blocks == MAX_BLOCKS
    if full_blocks is None:
        least, most = (blocks - 1) * length + 1 if blocks else 0, TOKENS_MAX if cut else blocks * length
        if not least <= request.prompt_tokens <= most:
            raise InvalidField(
                "prompt_tokens",
                request.prompt_tokens,
                f"{least} to {most} for {blocks} blocks of {length} tokens",
            )
    elif full_blocks < blocks - 1 or (full_blocks > blocks and not cut):
        raise InvalidField("full_blocks", full_blocks, f"{max(0, blocks - 1)} to {blocks} for {blocks} blocks")


def _read_receipt(fields: Fields) -> RecordedReceipt:
    return RecordedReceipt(
        policy=fields.text("policy"),
        rule=fields.text("rule"),
        pair=fields.texts("pair"),
        chosen=fields.text("chosen"),
        prompt_tokens=fields.integer("prompt_tokens"),
        matched_tokens=fields.integer("matched_tokens"),
        key_blocks=fields.integer("key_blocks"),
        key_tokens=fields.integer("key_tokens"),
        predicted_ttft_s=fields.number("predicted_ttft_s"),
        source=fields.text("source", "records"),
        fetch_tokens=fields.optional_integer("fetch_tokens"),
        moved_from=fields.text("moved_from", ""),
        prefill=fields.text("prefill", ""),
        prefiller=fields.text("prefiller", ""),
        candidates=tuple(map(_read_candidate, fields.subs("candidates"))),
    )


def _read_candidate(fields: Fields) -> CandidateReceipt:
    return CandidateReceipt(
        id=fields.text("id"),
        state=fields.text("state"),
        matched_tokens=fields.integer("matched_tokens"),
        pending_tokens=fields.integer("pending_tokens"),
        in_flight=fields.integer("in_flight"),
        ttft_s=fields.number("ttft_s"),
        fetch_tokens=fields.integer("fetch_tokens", 0),
    )


def _read_pool_changed(fields: Fields) -> PoolChanged:
    pool = fields.sub("pool")
    if pool is None:
        raise InvalidField("pool", None, "a JSON object")
    return PoolChanged(at_s=fields.number("at_s", high=EPOCH_S_MAX), pool=read_pool(pool))


def _read_pool_removed(fields: Fields) -> PoolRemoved:
    return PoolRemoved(at_s=fields.number("at_s", high=EPOCH_S_MAX), pool=fields.text("pool"))


def _read_missing(fields: Fields) -> Missing:
    return Missing(
        at_s=fields.number("at_s", high=EPOCH_S_MAX),
        unrouted=fields.integer("unrouted", 0),
        dropped=fields.integer("dropped", 0),
    )


_READERS: Final[Mapping[str, Callable[[Fields], Line]]] = {
    "recording": _read_header,
    "request": _read_request,
    "pool": _read_pool_changed,
    "pool_removed": _read_pool_removed,
    "missing": _read_missing,
}
