"""One LLM engine as a function of time: what arrives goes in with ``now``, what happened comes out as events.

The model is ALGORITHMS section 7: first come, first served; one prefill at a time, before any decode; a
request is admitted when its prompt and output fit into the KV memory beside those running, and until it is,
it keeps everyone behind it waiting; then all running requests decode together, one token each per step.

There is no clock, thread, socket or chance in here. Two drivers use the same object: ``engine_driver.py``
with the wall clock times a speed, and a discrete-event simulation of a cluster with a heap. The latter pushes
a million requests through, so nothing is done per token: a *run* is a stretch of decode steps over an
unchanged batch, its duration has a closed form, and it is cut short only when an arrival or an abort changes
what should happen next. Where single tokens matter, ``decode_steps`` and ``next_step_s`` read them off the
run under way.

Requests cost O(blocks + log batch); an engine that waits costs nothing.
"""

from math import inf

from dualmap_sim.decode_batch import DecodeBatch
from dualmap_sim.decode_run import DecodeRun
from dualmap_sim.engine_jobs import Job, JobState, WaitingJobs
from dualmap_sim.engine_requests import EngineEvent, EngineRequest, Finished, FirstToken
from dualmap_sim.errors import RequestDoesNotFit
from dualmap_sim.prefix_cache import PrefixCache
from dualmap_sim.presets import EngineConfig

__all__ = ["Engine", "EngineEvent", "EngineRequest", "Finished", "FirstToken"]


class Engine:
    """The engine model. ``now`` is in seconds, from any origin, and never goes back.

    A ``cache`` may be given for engines that share one; otherwise the engine has its own, as large as configured.
    """

    def __init__(self, config: EngineConfig, *, cache: PrefixCache | None = None) -> None:
        self.config = config
        self.cache = PrefixCache(config.cache_tokens // config.block_tokens) if cache is None else cache
        self.now_s = -inf
        self.prompt_tokens_total = 0
        """Prompt tokens of all prefills started."""
        self.cached_tokens_total = 0
        """The part of them that the prefix cache held."""
        self._jobs: dict[str, Job] = {}
        self._waiting = WaitingJobs()
        self._prefilling: Job | None = None
        self._batch = DecodeBatch()
        self._run: DecodeRun | None = None
        self._end_s = inf
        self._generated = 0
        self._kv_reserved = 0
        self._events: list[EngineEvent] = []

    @property
    def waiting(self) -> int:
        """Requests that have not begun their prefill."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Requests in prefill or decode."""
        return self._batch.size + (self._prefilling is not None)

    @property
    def kv_tokens_reserved(self) -> int:
        """KV tokens that admitted requests will hold at their end: what admission goes by."""
        return self._kv_reserved

    @property
    def kv_tokens_held(self) -> int:
        """KV tokens that admitted requests hold at the last ``now``; the prefix cache does not count."""
        prefilling = self._prefilling.request.prompt_tokens if self._prefilling is not None else 0
        return self._batch.kv_tokens + prefilling + self._batch.size * self._steps_in_run()

    @property
    def decode_steps(self) -> int:
        """Decode steps completed at the last ``now``, ever: a decoding request gains one token with each."""
        return self._batch.steps + self._steps_in_run()

    @property
    def generated_tokens_total(self) -> int:
        """Tokens generated at the last ``now``, ever, those of aborted requests included."""
        return self._generated + self._batch.size * self._steps_in_run()

    def cached_tokens(self, request: EngineRequest) -> int:
        """Return how many of the prompt's tokens a prefill beginning now would find in the cache.

        As in vLLM whole blocks only, and never the whole prompt: its last token is always computed, because the
        first output token comes from it.
        """
        whole = (request.prompt_tokens - 1) // self.config.block_tokens
        return self.cache.match(request.blocks[:whole]) * self.config.block_tokens

    def could_start(self, request: EngineRequest) -> bool:
        """Return whether a request submitted at the last ``now`` would be the next to prefill, and at once.

        At once is after the decode step under way: nothing waits or prefills, and its memory is free.
        """
        return (
            not self._waiting
            and self._prefilling is None
            and self._kv_reserved + self._need_tokens(request) <= self.config.kv_memory_tokens
        )

    def backlog_s(self, now: float) -> float:
        """Return after how many seconds a request submitted now would begin its prefill, behind all that wait.

        Taken from the cache as it is now; that some may have to wait for memory is not foreseen.
        """
        self._run_until(now)
        if self._run is not None:
            left_s = self._run.boundary_s(now) - now
        else:
            left_s = self._end_s - now if self._end_s < inf else 0.0
        return left_s + sum(self._prefill_s(job.request, *self._reused(job.request)) for job in self._waiting)

    def next_event_s(self) -> float | None:
        """Return when ``advance`` is due next, None while nothing is under way.

        ``submit``, ``abort`` and ``advance`` may change it. What is due is not always an event: a step that
        was cut short for an arrival ends too.
        """
        if self._events:
            return self.now_s
        return self._end_s if self._end_s < inf else None

    def next_step_s(self) -> float | None:
        """Return when the prefill or the decode step under way at the last ``now`` ends, None when idle.

        For drivers that show every token; those that want events only sleep until ``next_event_s``.
        """
        if self._run is not None:
            return self._run.end_of_s(self._run.done_at(self.now_s) + 1)
        return self.next_event_s()

    def submit(self, now: float, request: EngineRequest) -> None:
        """Take a request. Raises RequestDoesNotFit when it is larger than the whole KV memory."""
        assert request.request_id not in self._jobs, f"request {request.request_id} is already here"
        assert request.prompt_tokens >= 1, "a prompt has at least one token"
        assert request.output_tokens >= 1, "a prefill yields the first token"
        need_tokens = self._need_tokens(request)
        if need_tokens > self.config.kv_memory_tokens:
            raise RequestDoesNotFit(needed_tokens=need_tokens, memory_tokens=self.config.kv_memory_tokens)
        self._run_until(now)
        job = Job(request, need_tokens=need_tokens, arrived_s=now)
        self._jobs[request.request_id] = job
        self._waiting.push(job)
        self._look_at_queue(now)

    def abort(self, now: float, request_id: str) -> bool:
        """Give up on a request; True when it was still here, and then it will not be ``Finished``.

        A prefill stops at once and caches nothing. A decoding request holds its memory until the step ends.
        """
        self._run_until(now)
        job = self._jobs.pop(request_id, None)
        if job is None:
            return False
        if job.state is JobState.WAITING:
            self._waiting.drop(job)
            self._look_at_queue(now)
        elif job.state is JobState.PREFILLING:
            job.state = JobState.GONE
            self._prefilling = None
            self._kv_reserved -= job.need_tokens
            self._start_next(now)
        else:
            self._batch.leave(job)
            if self._run is None:
                self._take_steps(0, now)
            else:
                self._cut_run(now)
        return True

    def advance(self, now: float) -> list[EngineEvent]:
        """Let time pass until ``now``; return what has happened since the last call, in order of time."""
        self._run_until(now)
        events, self._events = self._events, []
        return events

    def _need_tokens(self, request: EngineRequest) -> int:
        return request.prompt_tokens + (request.output_tokens if self.config.decode is not None else 1)

    def _steps_in_run(self) -> int:
        return self._run.done_at(self.now_s) if self._run is not None else 0

    def _run_until(self, now: float) -> None:
        assert now >= self.now_s, f"time went back from {self.now_s} to {now}"
        while self._end_s <= now:
            end_s = self._end_s
            if self._prefilling is not None:
                self._end_prefill(self._prefilling, end_s)
            else:
                self._end_run()
            self._start_next(end_s)
        self.now_s = now

    def _look_at_queue(self, now: float) -> None:
        """Something changed in the queue: begin a prefill, or make the decode run end in time for it."""
        if self._end_s == inf:
            self._start_next(now)
        elif self._run is not None and self._admissible() is not None:
            self._cut_run(now)

    def _admissible(self) -> Job | None:
        """Return the head of the queue if its memory is free."""
        head = self._waiting.head()
        if head is not None and self._kv_reserved + head.need_tokens <= self.config.kv_memory_tokens:
            return head
        return None

    def _cut_run(self, now: float) -> None:
        """End the run with the step under way: a step, once begun, is finished."""
        assert self._run is not None
        self._run.cut(now)
        self._end_s = self._run.end_s
        self._run_until(now)

    def _start_next(self, now: float) -> None:
        job = self._admissible()
        if job is not None:
            self._waiting.pop_head()
            self._start_prefill(job, now)
        elif self._batch.size:
            assert self.config.decode is not None
            self._run = self._batch.run(self.config.decode, start_s=now)
            self._end_s = self._run.end_s
        else:
            self._end_s = inf

    def _reused(self, request: EngineRequest) -> tuple[int, int]:
        """Return the prompt tokens that need not be computed: those cached here, and those pulled beyond them."""
        cached = self.cached_tokens(request)
        if self.config.pull_tokens_per_s is None:
            return cached, 0
        return cached, max(0, min(request.pulled_tokens, request.prompt_tokens - 1) - cached)

    def _prefill_s(self, request: EngineRequest, cached: int, pulled: int) -> float:
        seconds = self.config.prefill.seconds(
            new_tokens=request.prompt_tokens - cached - pulled, cached_tokens=cached, pulled_tokens=pulled
        )
        return seconds + pulled / self.config.pull_tokens_per_s if self.config.pull_tokens_per_s else seconds

    def _start_prefill(self, job: Job, now: float) -> None:
        self._prefilling = job
        self._kv_reserved += job.need_tokens
        job.state = JobState.PREFILLING
        job.prefill_started_s = now
        job.cached_tokens, job.pulled_tokens = self._reused(job.request)
        self.prompt_tokens_total += job.request.prompt_tokens
        self.cached_tokens_total += job.cached_tokens
        self._end_s = now + self._prefill_s(job.request, job.cached_tokens, job.pulled_tokens)

    def _end_prefill(self, job: Job, now: float) -> None:
        request = job.request
        self._prefilling = None
        self.cache.insert(request.blocks[: request.prompt_tokens // self.config.block_tokens])
        self._generated += 1
        self._events.append(
            FirstToken(
                at_s=now,
                request_id=request.request_id,
                arrived_s=job.arrived_s,
                prefill_started_s=job.prefill_started_s,
                prompt_tokens=request.prompt_tokens,
                cached_tokens=job.cached_tokens,
                pulled_tokens=job.pulled_tokens,
                decode_step=self._batch.steps,
            )
        )
        if job.output_tokens > 1:
            self._batch.join(job)
        else:
            self._kv_reserved -= job.need_tokens
            self._finish(job, now)

    def _end_run(self) -> None:
        run = self._run
        assert run is not None
        self._run = None
        self._take_steps(run.steps, run.end_s)

    def _take_steps(self, steps: int, now: float) -> None:
        """Move the batch on, and let those go who are done or were aborted."""
        self._generated += steps * self._batch.size
        for job in self._batch.take(steps):
            self._kv_reserved -= job.need_tokens
            if job.state is JobState.DECODING:
                self._finish(job, now)

    def _finish(self, job: Job, now: float) -> None:
        job.state = JobState.GONE
        del self._jobs[job.request.request_id]
        self._events.append(
            Finished(
                at_s=now,
                request_id=job.request.request_id,
                arrived_s=job.arrived_s,
                output_tokens=job.output_tokens,
            )
        )
