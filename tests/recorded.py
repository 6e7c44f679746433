"""Recordings for tests: their values, and files of them."""

import gzip
from collections.abc import Iterable
from pathlib import Path

from dualmap.pools.pool import Model, Pool, Slo
from dualmap.recordings.lines import encode_line
from dualmap.recordings.values import Header, Line, PoolChanged, RecordedOutcome, RecordedReceipt, RecordedRequest

START_S = 1_790_000_000.0
POOL = Pool(namespace="llm", name="qwen", model=Model(name="Qwen"), slo=Slo(ttft_s=2.0))
HEADER = Header(router="router-a", started_s=START_S, key="00aa", sample=1.0, program="0.1.0")
CHANGED = PoolChanged(at_s=START_S, pool=POOL)


def receipt(chosen: str = "qwen-0", *, prompt_tokens: int = 512) -> RecordedReceipt:
    return RecordedReceipt(
        policy="dualmap",
        rule="pair-warm",
        pair=("qwen-0", "qwen-1"),
        chosen=chosen,
        prompt_tokens=prompt_tokens,
        matched_tokens=0,
        key_blocks=2,
        key_tokens=256,
        predicted_ttft_s=0.1,
    )


def request(after_s: float = 0.0, blocks: Iterable[int] = (1, 2, 3, 4), **fields: object) -> RecordedRequest:
    """Return a request that arrived ``after_s`` after START_S, with full blocks of 128 tokens and a measured answer."""
    hashes = tuple(blocks)
    given: dict[str, object] = {
        "arrived_s": START_S + after_s,
        "pool": POOL.id,
        "model": "Qwen",
        "streamed": True,
        "prompt_tokens": 128 * len(hashes),
        "block_tokens": 128,
        "blocks": hashes,
        "outcome": RecordedOutcome.OK,
        "receipt": receipt(prompt_tokens=128 * len(hashes)),
        "ttft_s": 0.5,
        "duration_s": 1.5,
        "engine_prompt_tokens": 128 * len(hashes),
        "output_tokens": 20,
        "cached_tokens": 0,
        **fields,
    }
    return RecordedRequest(**given)  # type: ignore[arg-type]


def text(*lines: Line) -> bytes:
    return "".join(map(encode_line, lines)).encode()


def write(path: Path, *lines: Line, header: Header = HEADER) -> Path:
    """Write a file of a recording, compressed with one member for each line if the name ends so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    texts = [text(line) for line in (header, *lines)]
    if path.suffix == ".gz":
        texts = [gzip.compress(each, mtime=0) for each in texts]
    path.write_bytes(b"".join(texts))
    return path
