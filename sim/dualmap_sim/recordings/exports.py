"""Converts recordings to the traces of other programs: Mooncake's JSONL, and what NVIDIA AIPerf reads of it.

A line has the arrival in milliseconds after the first one, the lengths, and one id for each block of the prompt. Equal
ids mean equal prefixes. AIPerf 0.13.0 reads the same fields (``MooncakeTrace`` in aiperf/dataset/loader/models.py), and
refuses an id with two lengths. It adds the turns of one ``session_id`` up to one prompt, so no line has this field:
each recorded prompt is complete.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import lcm

from dualmap.recordings.values import RecordedRequest
from dualmap_sim.recordings.errors import RecordingError


class ExportFormat(StrEnum):
    """A format to which recordings are converted."""

    MOONCAKE = "mooncake"
    AIPERF = "aiperf"


@dataclass(slots=True)
class Changes:
    """What a trace lacks of its recording: prompts without a block, and lengths that are not as recorded."""

    without_prompt: int = 0
    without_output: int = 0
    adjusted: int = 0


class Export:
    """The trace of recorded requests. Each call of ``requests`` returns all of them, in order of arrival.

    A full block has ``block_tokens`` tokens, as the engines count them on average, and ``router_block_tokens`` by the
    routers' estimate. ``changes`` is complete after ``lines``. Raises RecordingError if there are no requests.
    """

    def __init__(self, requests: Callable[[], Iterable[RecordedRequest]], format: ExportFormat) -> None:
        self._requests = requests
        self._format = format
        self.router_block_tokens, self.block_tokens = _block_tokens(requests())
        self.changes = Changes()
        self._ids: dict[int, int] = {}
        self._last_tokens: dict[int, int] = {}

    def prompts(self) -> Iterator[tuple[RecordedRequest, Sequence[int], int]]:
        """Yield each request that has a prompt, with one id for each block of the prompt, and the prompt's length."""
        for request in self._requests():
            if not request.blocks:
                self.changes.without_prompt += 1
                continue
            blocks, full = self._blocks(request)
            ids = [self._ids.setdefault(block, len(self._ids)) for block in blocks]
            yield request, ids, self._input_length(request, blocks, full)

    def lines(self) -> Iterator[str]:
        """Yield the lines of the trace, once."""
        first_s: float | None = None
        for request, ids, input_length in self.prompts():
            first_s = request.arrived_s if first_s is None else first_s
            fields: dict[str, object] = {
                "timestamp": round(1000 * (request.arrived_s - first_s)),
                "input_length": input_length,
            }
            if request.output_tokens:
                fields["output_length"] = request.output_tokens
            else:
                self.changes.without_output += 1
                if self._format is ExportFormat.MOONCAKE:
                    # Readers of Mooncake's traces require a length of at least 1.
                    fields["output_length"] = 1
            fields["hash_ids"] = ids
            yield json.dumps(fields) + "\n"

    def _blocks(self, request: RecordedRequest) -> tuple[Sequence[int], int]:
        """Return the hashes of a prompt's blocks, the last of which may be partial, and the number of full blocks."""
        joined = self.router_block_tokens // request.block_tokens
        blocks = request.blocks[joined - 1 :: joined]
        if len(request.blocks) % joined:
            blocks += request.blocks[-1:]
        return blocks, len(request.chain.cacheable) // joined

    def _input_length(self, request: RecordedRequest, blocks: Sequence[int], full: int) -> int:
        """Return the prompt's length, changed as far as its number of blocks requires.

        A partial block has the same length wherever it occurs.
        """
        tokens = full * self.block_tokens
        if full < len(blocks):
            if request.engine_prompt_tokens is None:
                prompt = round(request.prompt_tokens * self.block_tokens / self.router_block_tokens)
            else:
                prompt = request.engine_prompt_tokens
            tokens += self._last_tokens.setdefault(blocks[-1], max(1, min(prompt - tokens, self.block_tokens - 1)))
        self.changes.adjusted += tokens != request.known_prompt_tokens
        return tokens


def _block_tokens(requests: Iterable[RecordedRequest]) -> tuple[int, int]:
    """Return the tokens of a full block by the routers' estimate, and by the engines' counts where there are any.

    Blocks of pools with different lengths are joined to blocks of a common length.
    """
    lengths: set[int] = set()
    estimated = counted = 0
    for request in requests:
        lengths.add(request.block_tokens)
        if request.engine_prompt_tokens is not None:
            estimated += request.prompt_tokens
            counted += request.engine_prompt_tokens
    if not lengths:
        raise RecordingError("the recording has no requests, so there is nothing to export")
    length = lcm(*lengths)
    return length, max(1, round(length * counted / estimated)) if estimated else length
