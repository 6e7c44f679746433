"""The requests that decode together: their number, their KV tokens, and which request ends next.

``engine.py`` decides when the batch takes its steps, and ``decode_run.py`` computes their duration. Requests join and
leave between two steps, in O(log batch) each.
"""

from heapq import heappop, heappush

from dualmap_sim.decode_run import DecodeRun
from dualmap_sim.engine_jobs import Job, JobState
from dualmap_sim.presets import DecodeCost


class DecodeBatch:
    """A batch and the number of decode steps it has taken. Each step adds one token to every request of the batch."""

    __slots__ = ("_by_last_step", "_joins", "_leaving", "kv_tokens", "size", "steps")

    def __init__(self) -> None:
        self.size = 0
        self.steps = 0
        """All steps of the batch so far, also those of requests that have left."""
        self.kv_tokens = 0
        """KV tokens that the current requests hold after ``steps``."""
        # Aborted jobs stay in the heap until they reach its top.
        self._by_last_step: list[tuple[int, int, Job]] = []
        self._joins = 0
        self._leaving: list[Job] = []

    def join(self, job: Job) -> None:
        """Add a job that has its first token and needs more tokens."""
        job.state = JobState.DECODING
        job.joined_step = self.steps
        job.finish_step = self.steps + job.output_tokens - 1
        self._joins += 1
        heappush(self._by_last_step, (job.finish_step, self._joins, job))
        self.size += 1
        self.kv_tokens += job.request.prompt_tokens + 1

    def leave(self, job: Job) -> None:
        """Mark an aborted job. The next ``take`` removes the job."""
        self._leaving.append(job)

    def run(self, cost: DecodeCost, *, start_s: float) -> DecodeRun:
        """Return a run from ``start_s`` until the first request is done. The batch must not be empty."""
        heap = self._by_last_step
        while heap[0][2].state is JobState.GONE:
            heappop(heap)
        return DecodeRun(
            cost, start_s=start_s, steps=heap[0][0] - self.steps, requests=self.size, kv_tokens=self.kv_tokens
        )

    def take(self, steps: int) -> list[Job]:
        """Take steps, at most until the first request is done. Return the jobs that left.

        The state of a finished job is still ``DECODING``. With zero steps, only aborted jobs leave.
        """
        self.steps += steps
        self.kv_tokens += steps * self.size
        left, self._leaving = self._leaving, []
        for job in left:
            job.state = JobState.GONE
            self._forget(job)
        heap = self._by_last_step
        while heap and heap[0][0] <= self.steps:
            job = heappop(heap)[2]
            if job.state is JobState.DECODING:
                left.append(job)
                self._forget(job)
        if not self.size:
            heap.clear()  # The remaining entries are aborted jobs.
        return left

    def _forget(self, job: Job) -> None:
        self.size -= 1
        self.kv_tokens -= job.request.prompt_tokens + 1 + self.steps - job.joined_step
