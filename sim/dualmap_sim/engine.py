"""One LLM engine as a function of time. Calls pass in requests and ``now``, and return events.

docs/engine-model.md describes the model. Requests are served first come, first served. One prefill runs at a time, and
prefills run before decodes. The engine admits a request when its prompt and output fit into the free KV memory. Until
then the request blocks the requests behind it. All running requests decode together, one token each per step. With
``chunk_tokens``, prompts are computed in pieces alongside the decodes (``chunked.py``).

The model has no clock, thread, socket or randomness. It has two drivers: ``engine_driver.py`` with a scaled wall clock,
and the discrete-event simulation of a cluster. The simulation serves a million requests, so the model does no work per
token. A *run* is a series of decode steps over an unchanged batch; a closed form gives its duration. A run ends early
at an arrival or an abort. ``decode_steps`` and ``next_step_s`` derive single tokens from the current run.

A request costs O(blocks + log batch + log queue), and each piece of a chunked prompt O(1). An idle engine has no cost.

With a ``BlockPool`` as its cache, the engine has physical blocks and reports KV events at the end of each step.
Blocks of answers are then cached as well.
"""

from collections.abc import Sequence
from math import inf

from dualmap_sim.answer_blocks import AnswerBlocks
from dualmap_sim.block_pool import BlockPool, EventBatch
from dualmap_sim.chunked import ChunkedStep, full_steps_s
from dualmap_sim.decode_batch import DecodeBatch
from dualmap_sim.decode_run import DecodeRun
from dualmap_sim.engine_jobs import Job, JobState, WaitingJobs
from dualmap_sim.engine_requests import EngineEvent, EngineRequest, Finished, FirstToken
from dualmap_sim.errors import RequestDoesNotFit
from dualmap_sim.prefix_cache import PrefixCache
from dualmap_sim.presets import EngineConfig

__all__ = ["Engine", "EngineEvent", "EngineRequest", "Finished", "FirstToken"]


class Engine:
    """The engine model. ``now`` is in seconds from any origin, and never decreases.

    Several engines may share a ``PrefixCache``. Without ``cache``, the engine has its own one of the configured size.
    """

    def __init__(self, config: EngineConfig, *, cache: PrefixCache | BlockPool | None = None) -> None:
        self.config = config
        self.cache = PrefixCache(config.cache_tokens // config.block_tokens) if cache is None else cache
        self._pool = self.cache if isinstance(self.cache, BlockPool) else None
        self._answer_blocks = AnswerBlocks(config.block_tokens)
        self._batches: list[EventBatch] = []
        self._reported_steps = 0
        self.now_s = -inf
        self.prompt_tokens_total = 0
        """Prompt tokens of all started prefills."""
        self.cached_tokens_total = 0
        """Prompt tokens of all started prefills that were found in the prefix cache."""
        self._jobs: dict[str, Job] = {}
        # The ended requests whose KV stays in memory.
        self._kept: dict[str, Job] = {}
        self._waiting = WaitingJobs()
        # The requests with a prompt, or a piece of a prompt, in the current step.
        self._prefilling: list[Job] = []
        self._batch = DecodeBatch()
        self._run: DecodeRun | None = None
        # The end of the current step or run. A step outside a run computes prompts.
        self._end_s = inf
        self._generated = 0
        self._kv_reserved = 0
        self._events: list[EngineEvent] = []

    @property
    def waiting(self) -> int:
        """Number of requests that wait for their prefill."""
        return self._waiting.size

    @property
    def running(self) -> int:
        """Number of requests in prefill or decode."""
        return self._batch.size + len(self._prefilling)

    @property
    def memory_tokens(self) -> int:
        """KV tokens (prompt and output) that all admitted requests together may hold."""
        memory = self.config.kv_memory_tokens
        return memory if self._pool is None else min(memory, self._pool.usable_tokens)

    @property
    def kv_tokens_reserved(self) -> int:
        """KV tokens that the admitted requests will hold at their end. Admission counts these tokens as used."""
        return self._kv_reserved

    @property
    def kv_tokens_held(self) -> int:
        """KV tokens that the admitted requests hold at the last ``now``, without the prefix cache.

        A full prompt counts from the beginning of its prefill.
        """
        prefilling = sum(job.request.prompt_tokens for job in self._prefilling)
        return self._batch.kv_tokens + prefilling + self._batch.size * self._steps_in_run()

    @property
    def decode_steps(self) -> int:
        """All decode steps completed at the last ``now``. Each step adds one token to every decoding request."""
        return self._batch.steps + self._steps_in_run()

    @property
    def generated_tokens_total(self) -> int:
        """All tokens generated at the last ``now``, including those of aborted requests."""
        return self._generated + self._batch.size * self._steps_in_run()

    def cached_tokens(self, request: EngineRequest) -> int:
        """Return how many of the prompt's tokens a prefill that begins now would find in the cache.

        As in vLLM, only full blocks count, and never the full prompt. The engine always computes the prompt's last
        token, because that token produces the first output token.
        """
        whole = (request.prompt_tokens - 1) // self.config.block_tokens
        return self.cache.match(request.blocks[:whole]) * self.config.block_tokens

    def could_start(self, request: EngineRequest) -> bool:
        """Return whether a request submitted at the last ``now`` would begin its prefill after the current decode step.

        The result is True if no request waits or prefills, and if the memory for the request is free.
        """
        return not self._waiting.size and not self._prefilling and self._admits(self._need_tokens(request))

    def backlog_s(self, now: float) -> float:
        """Return the seconds until a request submitted now would begin its prefill, behind all waiting requests.

        The result uses the current cache and batch, and does not include waits for memory.
        """
        self._run_until(now)
        config, batch = self.config, self._batch
        if self._run is not None:
            left_s = self._run.boundary_s(now) - now
        else:
            left_s = self._end_s - now if self._end_s < inf else 0.0
        if config.chunk_tokens is not None:
            prompts = [self._left(job) for job in (*self._prefilling, *self._waiting)]
            return left_s + full_steps_s(config, prompts, decoding=batch.size, kv_tokens=batch.kv_tokens)
        return left_s + sum(config.prefill.overhead_s + self._left(job)[1] for job in self._waiting)

    def next_event_s(self) -> float | None:
        """Return the time of the next ``advance``, None while the engine is idle.

        ``submit``, ``abort`` and ``advance`` may change this time. ``advance`` may then return no event: an arrival can
        end a run of steps early.
        """
        if self._events:
            return self.now_s
        due_s = self._end_s
        if self._pool is not None and self._run is not None and (step := self._answer_blocks.next_step) is not None:
            due_s = min(due_s, self._run.end_of_s(step - self._batch.steps))
        return due_s if due_s < inf else None

    def next_step_s(self) -> float | None:
        """Return when the prefill or decode step in progress at the last ``now`` ends, None if the engine is idle.

        Drivers that show every token use this method. Drivers that need only events use ``next_event_s``.
        """
        if self._run is not None:
            return self._run.end_of_s(self._run.done_at(self.now_s) + 1)
        return self.next_event_s()

    def submit(self, now: float, request: EngineRequest) -> None:
        """Accept a request. Raises RequestDoesNotFit if the request is larger than the full KV memory."""
        assert request.request_id not in self._jobs, f"request {request.request_id} is already here"
        assert request.prompt_tokens >= 1, "a prompt has at least one token"
        assert request.output_tokens >= 1, "a prefill yields the first token"
        need_tokens = self._need_tokens(request)
        if need_tokens > self.memory_tokens:
            raise RequestDoesNotFit(needed_tokens=need_tokens, memory_tokens=self.memory_tokens)
        self._run_until(now)
        job = Job(request, need_tokens=need_tokens, arrived_s=now)
        self._jobs[request.request_id] = job
        self._waiting.push(job)
        self._look_at_queue(now)

    def abort(self, now: float, request_id: str) -> bool:
        """Abort a request. Return True if the engine still had the request; then no ``Finished`` follows.

        A prefill in its own step stops at once and adds no blocks to the cache. A request that shares a step holds its
        memory until the step ends.
        """
        self._run_until(now)
        job = self._jobs.pop(request_id, None)
        if job is None:
            return False
        if job.state is JobState.WAITING:
            self._waiting.drop(job)
            self._look_at_queue(now)
        elif job.state is JobState.PREFILLING:
            self._abort_prefill(job, now)
        else:
            self._batch.leave(job)
            if self._run is not None:
                self._cut_run(now)
            elif self.config.chunk_tokens is None:  # In a chunked step, the job leaves when the step ends.
                self._take_steps(0, now)
        return True

    def release_kv(self, now: float, request_id: str) -> None:
        """Release the KV of an ended request with ``keeps_kv``. A second call has no effect."""
        self._run_until(now)
        job = self._kept.pop(request_id, None)
        if job is not None:
            self._release(job)
            self._look_at_queue(now)

    def advance(self, now: float) -> list[EngineEvent]:
        """Advance to ``now``; return the events since the last call, in order of time."""
        self._run_until(now)
        events, self._events = self._events, []
        return events

    def take_event_batches(self) -> list[EventBatch]:
        """Return the KV events of the steps that ended since the last call. Only a ``BlockPool`` has events."""
        batches, self._batches = self._batches, []
        return batches

    def cache_prompt(self, now: float, blocks: Sequence[int]) -> None:
        """Cache a prompt that another source has sent, without the time of its prefill. Its KV events are due now."""
        self._run_until(now)
        self.cache.insert(blocks)
        self._end_step(now)

    def reset_cache(self) -> bool:
        """Empty the cache, and return whether it was emptied. A ``BlockPool`` refuses while requests are in flight.

        As in vLLM, the event of the reset belongs to the next step.
        """
        if self._pool is not None:
            return self._pool.reset()
        self.cache.clear()
        return True

    def _need_tokens(self, request: EngineRequest) -> int:
        return request.prompt_tokens + (request.output_tokens if self.config.decode is not None else 1)

    def _steps_in_run(self) -> int:
        return self._run.done_at(self.now_s) if self._run is not None else 0

    def _run_until(self, now: float) -> None:
        assert now >= self.now_s, f"time went back from {self.now_s} to {now}"
        while self._end_s <= now:
            end_s = self._end_s
            if self._run is None:
                self._end_prefills(end_s)
            else:
                self._end_run()
            self._start_next(end_s)
        if self._pool is not None and self._run is not None:  # Else `done_at` would be computed for nothing.
            self._fill_answers(self._batch.steps + self._run.done_at(now), self._run)
        self.now_s = now

    def _look_at_queue(self, now: float) -> None:
        """Begin a prefill after a change of the queue, or shorten the decode run so that a prefill can begin."""
        if self._end_s == inf:
            self._start_next(now)
        elif self._run is not None and self._admissible() is not None:
            self._cut_run(now)

    def _admits(self, need_tokens: int) -> bool:
        """Return whether a prefill that needs these tokens could begin in a step that begins now."""
        config = self.config
        if config.chunk_tokens is not None and self._batch.size >= config.chunk_tokens:
            return False
        if self._pool is not None and not self._pool.admits(need_tokens):
            return False
        return self._kv_reserved + need_tokens <= config.kv_memory_tokens

    def _admissible(self) -> Job | None:
        """Return the head of the queue if its prefill could begin in a step that begins now."""
        if not self._waiting.size:
            return None
        head = self._waiting.head()
        return head if self._admits(head.need_tokens) else None

    def _cut_run(self, now: float) -> None:
        """End the run after the step in progress."""
        assert self._run is not None
        self._run.cut(now)
        self._end_s = self._run.end_s
        self._run_until(now)

    def _start_next(self, now: float) -> None:
        if self.config.chunk_tokens is None:
            prefill_s = self._start_prefill(now)
        else:
            prefill_s = self._start_chunks(now)
        if prefill_s is not None:
            self._end_s = now + prefill_s
        elif self._batch.size:
            assert self.config.decode is not None
            self._run = self._batch.run(self.config.decode, start_s=now)
            self._end_s = self._run.end_s
        else:
            self._end_s = inf

    def _start_prefill(self, now: float) -> float | None:
        """Begin the full prefill of the queue's head; return its duration."""
        job = self._admissible()
        if job is None:
            return None
        self._admit(job, now)
        new_tokens = job.request.prompt_tokens - job.computed_tokens
        job.computed_tokens = job.request.prompt_tokens
        return self.config.prefill_s(
            new_tokens=new_tokens, cached_tokens=job.cached_tokens, pulled_tokens=job.pulled_tokens
        )

    def _start_chunks(self, now: float) -> float | None:
        """Begin a step that computes prompts or pieces of prompts alongside the batch; return its duration."""
        step = ChunkedStep(self.config, decoding=self._batch.size, kv_tokens=self._batch.kv_tokens)
        if not step.left_tokens:
            return None
        for job in self._prefilling:
            self._add_chunk(step, job)
        while step.left_tokens and (head := self._admissible()) is not None:
            self._admit(head, now)
            self._add_chunk(step, head)
        return step.seconds if self._prefilling else None

    def _add_chunk(self, step: ChunkedStep, job: Job) -> None:
        step.add(job)
        if self._pool is not None or job.computed_tokens == job.request.prompt_tokens:
            self._store(job)

    def _admit(self, job: Job, now: float) -> None:
        """Move the head of the queue into prefill."""
        self._waiting.pop_head()
        self._prefilling.append(job)
        self._kv_reserved += job.need_tokens
        job.state = JobState.PREFILLING
        job.prefill_started_s = now
        job.cached_tokens, job.pulled_tokens = self._reused(job.request)
        job.computed_tokens = job.cached_tokens + job.pulled_tokens
        if self._pool is not None:
            self._pool.begin(job.request, need_tokens=job.need_tokens, cached_tokens=job.cached_tokens)
        self.prompt_tokens_total += job.request.prompt_tokens
        self.cached_tokens_total += job.cached_tokens

    def _reused(self, request: EngineRequest) -> tuple[int, int]:
        """Return the prompt tokens that need no computation: tokens in the own cache, and further tokens to pull."""
        cached = self.cached_tokens(request)
        if self.config.pull_tokens_per_s is None:
            return cached, 0
        return cached, max(0, min(request.pulled_tokens, request.prompt_tokens - 1) - cached)

    def _left(self, job: Job) -> tuple[int, float]:
        """Return the number of prompt tokens left to compute, and the seconds for them without overhead."""
        if job.state is JobState.PREFILLING:
            before, reuse_s = job.computed_tokens, 0.0
        else:
            cached, pulled = self._reused(job.request)
            before, reuse_s = cached + pulled, self.config.reuse_s(cached_tokens=cached, pulled_tokens=pulled)
        left = job.request.prompt_tokens - before
        return left, reuse_s + self.config.prefill.compute_s(new_tokens=left, cached_tokens=before)

    def _store(self, job: Job) -> None:
        """Cache the blocks of a prompt that has been computed; a ``BlockPool`` also caches those of its pieces."""
        if self._pool is not None:
            self._pool.fill(job.request.request_id, job.computed_tokens)
        else:
            self.cache.insert(job.request.blocks[: job.request.prompt_tokens // self.config.block_tokens])

    def _fill_answers(self, steps: int, run: DecodeRun | None) -> None:
        """Store the answers' blocks that are complete after ``steps`` steps of the batch in all.

        The steps of a run have separate events. In a chunked step, the events belong to the step's prompts as well.
        """
        if self._pool is None:
            return
        while (step := self._answer_blocks.next_step) is not None and step <= steps:
            for job, tokens in self._answer_blocks.take():
                self._pool.fill(job.request.request_id, tokens)
            if run is not None:
                self._end_step(run.end_of_s(step - self._batch.steps))

    def _end_step(self, now: float) -> None:
        """Report the KV events of a step."""
        if self._pool is not None and (events := self._pool.take_events()):
            self._batches.append(EventBatch(self._reported_steps, now, events))
            self._reported_steps += 1

    def _release(self, job: Job) -> None:
        """Release the memory of a job that leaves the engine."""
        self._kv_reserved -= job.need_tokens
        if self._pool is not None:
            self._pool.end(job.request.request_id)

    def _release_at_end(self, job: Job) -> None:
        """Release the memory of a job that has ended or was aborted, unless another engine pulls its KV."""
        if job.request.keeps_kv and job.state is not JobState.GONE:
            self._kept[job.request.request_id] = job
        else:
            self._release(job)

    def _abort_prefill(self, job: Job, now: float) -> None:
        job.state = JobState.GONE
        if self.config.chunk_tokens is None:  # In a chunked step, the job leaves when the step ends.
            self._prefilling.clear()
            self._release(job)
            self._start_next(now)

    def _end_prefills(self, now: float) -> None:
        """End a step that computed prompts. In a chunked step, the batch also ends its decode step."""
        jobs, self._prefilling = self._prefilling, []
        if self.config.chunk_tokens is None:
            self._store(jobs[0])
        elif self._batch.size:
            self._take_steps(1, now)
        for job in jobs:
            if job.state is JobState.GONE:
                self._release(job)
            elif job.computed_tokens < job.request.prompt_tokens:
                self._prefilling.append(job)
            else:
                self._first_token(job, now)
        self._end_step(now)

    def _first_token(self, job: Job, now: float) -> None:
        self._generated += 1
        self._events.append(
            FirstToken(
                at_s=now,
                request_id=job.request.request_id,
                arrived_s=job.arrived_s,
                prefill_started_s=job.prefill_started_s,
                prompt_tokens=job.request.prompt_tokens,
                cached_tokens=job.cached_tokens,
                pulled_tokens=job.pulled_tokens,
                decode_step=self._batch.steps,
            )
        )
        if job.output_tokens > 1:
            self._batch.join(job)
            if self._pool is not None:
                self._answer_blocks.join(job)
        else:
            self._release_at_end(job)
            self._finish(job, now)

    def _end_run(self) -> None:
        run = self._run
        assert run is not None
        self._fill_answers(self._batch.steps + run.steps, run)
        self._run = None
        self._take_steps(run.steps, run.end_s)

    def _take_steps(self, steps: int, now: float) -> None:
        """Advance the batch by some steps, and release the finished and aborted requests."""
        self._generated += steps * self._batch.size
        self._fill_answers(self._batch.steps + steps, None)
        for job in self._batch.take(steps):
            self._release_at_end(job)
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
