"""One engine's requests: the state of each request, and the order of the waiting requests.

``engine.py`` changes the states of the jobs. ``decode_batch.py`` holds the decoding jobs.
"""

from collections.abc import Iterator
from enum import Enum, auto
from heapq import heappop, heappush
from math import inf

from dualmap_sim.engine_requests import EngineRequest


class JobState(Enum):
    """The state of a request in the engine."""

    WAITING = auto()
    PREFILLING = auto()
    DECODING = auto()
    GONE = auto()


class Job:
    """One request in the engine."""

    __slots__ = (
        "arrived_s",
        "cached_tokens",
        "computed_tokens",
        "finish_step",
        "joined_step",
        "need_tokens",
        "output_tokens",
        "prefill_started_s",
        "pulled_tokens",
        "request",
        "state",
    )

    def __init__(self, request: EngineRequest, *, need_tokens: int, arrived_s: float) -> None:
        self.request = request
        self.need_tokens = need_tokens
        self.output_tokens = need_tokens - request.prompt_tokens
        self.arrived_s = arrived_s
        self.state = JobState.WAITING
        self.prefill_started_s = inf
        self.cached_tokens = 0
        self.pulled_tokens = 0
        # The leading prompt tokens that have KV when the current step ends.
        self.computed_tokens = 0
        self.joined_step = 0
        self.finish_step = 0


class WaitingJobs:
    """The jobs that wait for their prefill, ordered by priority and then by arrival."""

    __slots__ = ("_arrivals", "_heap", "size")

    def __init__(self) -> None:
        # Aborted jobs stay in the heap until they reach its top.
        self._heap: list[tuple[int, int, Job]] = []
        self._arrivals = 0
        self.size = 0

    def __iter__(self) -> Iterator[Job]:
        """Yield the waiting jobs in no particular order."""
        return (job for _, _, job in self._heap if job.state is JobState.WAITING)

    def push(self, job: Job) -> None:
        """Add a waiting job."""
        self._arrivals += 1
        self.size += 1
        heappush(self._heap, (job.request.priority, self._arrivals, job))

    def head(self) -> Job:
        """Return the next job. The queue must not be empty."""
        heap = self._heap
        while heap[0][2].state is JobState.GONE:
            heappop(heap)
        return heap[0][2]

    def pop_head(self) -> None:
        """Remove the job that ``head`` has just returned."""
        heappop(self._heap)
        self.size -= 1

    def drop(self, job: Job) -> None:
        """Remove a job from the queue."""
        job.state = JobState.GONE
        self.size -= 1
