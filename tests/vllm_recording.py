"""The recordings of a real vLLM (``tests/sim/fixtures``) as what a router in front of it would record."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dualmap.recordings.values import RecordedOutcome, RecordedReceipt, RecordedRequest

FIXTURES = Path(__file__).parent / "sim" / "fixtures"
POOL = "llm/tiny"
_PAUSE_S = 1.0


def recorded(name: str, rounds: tuple[int, ...] = (0, 2, 1, 3)) -> list[RecordedRequest]:
    """Return the requests of some rounds in order of arrival, as if the rounds had followed each other.

    The folder of ``bench`` must be in ``sys.path``.
    """
    recording = importlib.import_module("bench.engine.recording").read_recording(FIXTURES / f"{name}.jsonl")
    # The benchmark numbers equal blocks alike. Requests of two groups have no blocks in common.
    blocks = importlib.import_module("bench.engine.replay")._Blocks(recording.tokens("block_tokens"))
    begin_s, requests = 1000.0, []
    for number in rounds:
        for index, group in enumerate(each for each in recording.groups if each.round == number):
            own = list(_group(group, begin_s, (number * 1000 + index) << 40, blocks, recording.tokens("block_tokens")))
            requests += own
            begin_s = _PAUSE_S + max(each.arrived_s + (each.duration_s or 0.0) for each in own)
    return sorted(requests, key=lambda each: each.arrived_s)


def _group(group: Any, begin_s: float, first_block: int, blocks: Any, block_tokens: int) -> Iterator[RecordedRequest]:
    for seen in group.requests:
        chain = tuple(first_block + each for each in blocks.of(seen))
        receipt = RecordedReceipt(
            policy="dualmap", rule="pair-cold", pair=("tiny-0", "tiny-0"), chosen="tiny-0",
            prompt_tokens=seen.prompt_tokens, matched_tokens=0, key_blocks=1, key_tokens=1, predicted_ttft_s=0.0,
        )  # fmt: skip
        yield RecordedRequest(
            arrived_s=begin_s + seen.sent_s,
            pool=POOL,
            model="tiny",
            streamed=True,
            prompt_tokens=seen.prompt_tokens,
            block_tokens=block_tokens,
            blocks=chain,
            outcome=RecordedOutcome.OK,
            receipt=receipt,
            attempts=1,
            ttft_s=seen.ttft_s,
            duration_s=seen.token_s[-1] - seen.sent_s,
            engine_prompt_tokens=seen.prompt_tokens,
            output_tokens=len(seen.token_s),
            cached_tokens=seen.cached_tokens,
        )
