"""Strategies and values of recordings for tests."""

from hypothesis import strategies as st

from builders import pool
from dualmap.receipt import CandidateReceipt
from dualmap.recordings.values import (
    Header,
    Line,
    Missing,
    PoolChanged,
    PoolRemoved,
    RecordedOutcome,
    RecordedReceipt,
    RecordedRequest,
)

_TOKENS = st.integers(0, 10**9)
_SECONDS = st.floats(0, 1e8)
_EPOCH_S = st.floats(0, 1e11)
_HASHES = st.integers(0, 2**64 - 1)
_NAMES = st.text(min_size=1, max_size=20)

_CANDIDATES = st.builds(
    CandidateReceipt,
    id=_NAMES,
    state=_NAMES,
    matched_tokens=_TOKENS,
    pending_tokens=_TOKENS,
    in_flight=_TOKENS,
    ttft_s=_SECONDS,
    fetch_tokens=_TOKENS,
)
_RECEIPTS = st.builds(
    RecordedReceipt,
    policy=_NAMES,
    rule=_NAMES,
    pair=st.lists(st.text(), max_size=2).map(tuple),
    chosen=_NAMES,
    prompt_tokens=_TOKENS,
    matched_tokens=_TOKENS,
    key_blocks=_TOKENS,
    key_tokens=_TOKENS,
    predicted_ttft_s=_SECONDS,
    source=st.sampled_from(["records", "events"]),
    fetch_tokens=st.none() | _TOKENS,
    moved_from=st.text(max_size=5),
    prefill=st.text(max_size=5),
    prefiller=st.text(max_size=5),
    candidates=st.lists(_CANDIDATES, max_size=3).map(tuple),
)
_ANY_REQUESTS = st.builds(
    RecordedRequest,
    arrived_s=_EPOCH_S,
    pool=_NAMES,
    model=st.text(),
    streamed=st.booleans(),
    prompt_tokens=_TOKENS,
    block_tokens=st.integers(1, 10**6),
    blocks=st.lists(_HASHES, max_size=5).map(tuple),
    outcome=st.sampled_from(RecordedOutcome),
    full_blocks=st.none() | _TOKENS,
    exact=st.booleans(),
    adapter=st.text(max_size=5),
    priority=st.integers(-(2**31), 2**31),
    sequences=st.integers(1, 100),
    session=st.none() | _HASHES,
    client=st.none() | _HASHES,
    request=st.none() | _HASHES,
    receipt=st.none() | _RECEIPTS,
    code=st.text(max_size=5),
    served=st.text(max_size=5),
    attempts=st.none() | _TOKENS,
    queued_s=st.none() | _SECONDS,
    ttft_s=st.none() | _SECONDS,
    duration_s=st.none() | _SECONDS,
    engine_prompt_tokens=st.none() | _TOKENS,
    output_tokens=st.none() | _TOKENS,
    cached_tokens=st.none() | _TOKENS,
    comparable=st.booleans(),
).filter(
    lambda each: (
        (each.cached_tokens or 0) <= (10**9 if each.engine_prompt_tokens is None else each.engine_prompt_tokens)
    )
)


def _with_counts(request: RecordedRequest, share: float, *, is_full: bool, is_told: bool) -> RecordedRequest:
    """Return a request whose counts are those of its blocks, of which ``share`` says how full the last one is."""
    before, length = max(0, len(request.blocks) - 1), request.block_tokens
    if is_told:
        return request._replace(full_blocks=before + is_full * bool(request.blocks))
    tokens = before * length + 1 + int(share * (length - 1)) if request.blocks else 0
    return request._replace(full_blocks=None, prompt_tokens=tokens)


REQUESTS = st.builds(_with_counts, _ANY_REQUESTS, share=st.floats(0, 1), is_full=st.booleans(), is_told=st.booleans())
LINES: st.SearchStrategy[Line] = st.one_of(
    REQUESTS,
    st.builds(
        Header,
        router=_NAMES,
        started_s=_EPOCH_S,
        key=_NAMES,
        sample=st.floats(0, 1, exclude_min=True),
        program=st.text(max_size=5),
    ),
    st.builds(PoolRemoved, at_s=_EPOCH_S, pool=_NAMES),
    st.builds(Missing, at_s=_EPOCH_S, unrouted=_TOKENS, dropped=_TOKENS),
    st.builds(PoolChanged, at_s=_EPOCH_S, pool=st.sampled_from([pool(0), pool(3)])),
)

REQUEST = RecordedRequest(
    arrived_s=1_764_291_234.5,
    pool="llm/qwen",
    model="m",
    streamed=True,
    prompt_tokens=300,
    block_tokens=128,
    blocks=(1, 2, 2**64 - 1),
    outcome=RecordedOutcome.OK,
    session=7,
    ttft_s=0.25,
    receipt=RecordedReceipt(
        policy="dualmap",
        rule="pair-cold",
        pair=("m-0", "m-1"),
        chosen="m-0",
        prompt_tokens=300,
        matched_tokens=0,
        key_blocks=2,
        key_tokens=256,
        predicted_ttft_s=0.2,
        candidates=(CandidateReceipt("m-0", "Active", 0, 0, 0, 0.2), CandidateReceipt("m-1", "Active", 0, 9, 1, 0.3)),
    ),
)
HEADER = Header(router="router-0", started_s=1_764_291_200.0, key="6a1d", sample=0.1, program="0.1.0")
