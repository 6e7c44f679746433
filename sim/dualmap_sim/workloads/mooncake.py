"""Reads Mooncake's JSONL traces: one request per line, with the prompt as ids of 512-token blocks.

A line is ``{"timestamp": MILLISECONDS, "input_length": TOKENS, "output_length": TOKENS, "hash_ids": [ID, ...]}``. The
DualMap paper replays two such traces (section A.2.1). The error for an invalid line contains the line's number, the
field and the value.
"""

import json
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Final

from dualmap_sim.presets import TRACE_BLOCK_TOKENS
from dualmap_sim.workloads.trace import Trace, TraceRequest

_SHOWN_CHARACTERS: Final = 60
_TIMESTAMP_MS_MAX: Final = 1e15
"""Thirty thousand years: excludes infinity and unreasonable times."""


class TraceError(Exception):
    """A trace cannot be replayed; the message contains file, line, field, value and accepted values."""


def read_mooncake(path: Path, *, start: int = 0, limit: int | None = None) -> Trace:
    """Read ``limit`` requests (None: all), starting with number ``start``. Other lines are not checked."""
    try:
        with path.open(encoding="utf-8") as lines:
            return parse_mooncake(lines, source=str(path), start=start, limit=limit)
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}; give a readable file in Mooncake's JSONL form") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: the file is not UTF-8 text; give a file in Mooncake's JSONL form") from error


def parse_mooncake(lines: Iterable[str], *, source: str, start: int = 0, limit: int | None = None) -> Trace:
    """Parse a trace's lines; blank lines are skipped. Every error message begins with ``source``."""
    numbered = ((number, line) for number, line in enumerate(lines, start=1) if line.strip())
    window = islice(numbered, start, None if limit is None else start + limit)
    requests: list[TraceRequest] = []
    for number, line in window:
        previous_s = requests[-1].arrival_s if requests else 0.0
        requests.append(_Line(line, where=f"{source}:{number}").request(not_before_s=previous_s))
    if not requests:
        raise TraceError(
            f"{source}: the trace has no request at or after number {start}; give a longer trace or a lower start"
        )
    return Trace(name=Path(source).name, block_tokens=TRACE_BLOCK_TOKENS, requests=tuple(requests))


class _Line:
    """A line of a trace while it is parsed; its position becomes part of each error message."""

    def __init__(self, text: str, *, where: str) -> None:
        self._where = where
        try:
            fields = json.loads(text)
        except ValueError as error:
            raise TraceError(f"{where}: the line is not JSON ({error}); give one JSON object per line") from error
        if not isinstance(fields, dict):
            raise TraceError(f"{where}: {_shown(fields)} is not accepted; give one JSON object per line")
        self._fields: dict[str, object] = fields

    def request(self, *, not_before_s: float) -> TraceRequest:
        input_tokens = self._count("input_length")
        return TraceRequest(
            arrival_s=self._arrival_s(not_before_s),
            blocks=self._blocks(-(-input_tokens // TRACE_BLOCK_TOKENS)),
            input_tokens=input_tokens,
            output_tokens=self._count("output_length"),
        )

    def _arrival_s(self, not_before_s: float) -> float:
        value = self._fields.get("timestamp")
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not 0 <= value <= _TIMESTAMP_MS_MAX
            or value / 1000 < not_before_s
        ):
            accepted = f"milliseconds, not before the previous request's ({not_before_s * 1000:g})"
            raise self._refusal("timestamp", value, accepted)
        return value / 1000

    def _count(self, field: str) -> int:
        value = self._fields.get(field)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._refusal(field, value, "a whole number of tokens, at least 1")
        return value

    def _blocks(self, needed: int) -> tuple[int, ...]:
        value = self._fields.get("hash_ids")
        accepted = f"a list of {needed} whole numbers, one for each {TRACE_BLOCK_TOKENS} tokens of input_length"
        if not isinstance(value, list) or len(value) != needed:
            raise self._refusal("hash_ids", value, accepted)
        for index, block in enumerate(value):
            if isinstance(block, bool) or not isinstance(block, int):
                raise self._refusal(f"hash_ids[{index}]", block, "a whole number")
        return tuple(value)

    def _refusal(self, field: str, value: object, accepted: str) -> TraceError:
        return TraceError(f"{self._where}: {field}: {_shown(value)} is not accepted; give {accepted}")


def _shown(value: object) -> str:
    if value is None:
        return "nothing"
    text = json.dumps(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
