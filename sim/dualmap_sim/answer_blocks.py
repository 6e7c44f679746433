"""The decode steps in which answers begin or complete a block, for an engine with a ``BlockPool``.

A decode step computes the KV of the token before it, so the last token of an answer has no KV. The decode batch skips
steps in a closed form; this module knows the steps that matter for blocks.
"""

from collections.abc import Iterator
from heapq import heappop, heappush

from dualmap_sim.engine_jobs import Job, JobState


class AnswerBlocks:
    """The next step of each decoding job that begins or completes a block. Steps are those of the engine's batch."""

    __slots__ = ("_block_tokens", "_heap", "_joins")

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        # Jobs that left the batch stay in the heap until they reach its top.
        self._heap: list[tuple[int, int, Job]] = []
        self._joins = 0

    @property
    def next_step(self) -> int | None:
        """The number of the first such step, None if there is none."""
        while self._heap and self._heap[0][2].state is not JobState.DECODING:
            heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def join(self, job: Job) -> None:
        """Add a job that has just joined the batch."""
        self._push(job, job.joined_step)

    def take(self) -> Iterator[tuple[Job, int]]:
        """Yield the jobs of the next step, with the number of their tokens that have KV after this step."""
        step = self.next_step
        while step is not None and self.next_step == step:
            job = heappop(self._heap)[2]
            yield job, job.request.prompt_tokens + step - job.joined_step
            self._push(job, step)

    def _push(self, job: Job, step: int) -> None:
        """Add a job's next step after ``step``."""
        size = self._block_tokens
        inside = (job.request.prompt_tokens + step - job.joined_step) % size
        # After a full block, the next token begins a block.
        step += size - inside if inside else 1
        if step <= job.finish_step:
            self._joins += 1
            heappush(self._heap, (step, self._joins, job))
