"""Converts the lines of Mooncake's traces to requests of a recording.

The length of a block follows from the lengths of the prompts: ``n`` ids stand for more than ``n - 1`` and at most ``n``
blocks. An id may be any whole number. Hashes are chained over the ids, so equal hashes mean equal prefixes, whether or
not the trace's ids do.
"""

from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Final

from xxhash import xxh3_64_intdigest

from dualmap.prompts.blocks import MAX_BLOCKS, chain_root
from dualmap.recordings.values import RecordedOutcome, RecordedRequest
from dualmap_sim.presets import TRACE_BLOCK_TOKENS
from dualmap_sim.recordings.errors import CannotImport, UnusableLine
from dualmap_sim.recordings.imports import ROUTER, ImportKey, read_objects, whole_number

_TIMESTAMP_MS_MAX: Final = 1e14


class MooncakeReader:
    """Reads the lines of the trace at ``path``. Raises CannotImport if its blocks have no common length."""

    def __init__(self, path: Path, key: ImportKey) -> None:
        self.block_tokens = _block_tokens(path)
        self._pool = f"{ROUTER}/{path.name}"
        self._root = chain_root(model=path.name, key=key.root_key)
        self._key = key

    def __call__(self, fields: Mapping[str, object]) -> RecordedRequest:
        """Return the request of a line. Raises UnusableLine."""
        tokens, output = whole_number(fields, "input_length", low=1), fields.get("output_length")
        link, hashes = self._root, []
        for block in _ids(fields)[:MAX_BLOCKS]:
            link = xxh3_64_intdigest(b"%d" % block, link)
            hashes.append(link)
        return RecordedRequest(
            arrived_s=_arrived_s(fields),
            pool=self._pool,
            model="",
            streamed=False,
            prompt_tokens=tokens,
            block_tokens=self.block_tokens,
            blocks=self._key.blocks(hashes),
            outcome=RecordedOutcome.OK,
            exact=True,
            output_tokens=None if output is None else whole_number(fields, "output_length", low=0),
        )


def _arrived_s(fields: Mapping[str, object]) -> float:
    value = fields.get("timestamp")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _TIMESTAMP_MS_MAX:
        raise UnusableLine("timestamp", value, "milliseconds from 0 on")
    return value / 1000


def _ids(fields: Mapping[str, object]) -> Sequence[int]:
    value = fields.get("hash_ids")
    if not isinstance(value, list) or not value or not all(type(each) is int for each in value):
        raise UnusableLine("hash_ids", value, "a list of whole numbers, one for each block of the prompt")
    return value


def _block_tokens(path: Path) -> int:
    """Return the length of a block that fits all lines: Mooncake's own, or a power of two, or the least."""
    low, high = 1, inf
    for number, fields in read_objects(path):
        if isinstance(fields, str):
            continue
        try:
            tokens, blocks = whole_number(fields, "input_length", low=1), len(_ids(fields))
        except UnusableLine:
            continue
        low = max(low, -(-tokens // blocks))
        if blocks > 1:
            high = min(high, (tokens - 1) // (blocks - 1))
        if low > high:
            raise CannotImport(
                f"{path}: line {number}: {blocks} hash_ids for an input_length of {tokens} do not fit the lines "
                "before; give a trace whose blocks all have one length"
            )
    if low <= TRACE_BLOCK_TOKENS <= high:
        return TRACE_BLOCK_TOKENS
    power = 1 << (low - 1).bit_length()
    return power if power <= high else low
