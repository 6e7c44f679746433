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

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from heapq import heappop, heappush
from math import inf

from dualmap_sim.decode_run import DecodeRun
from dualmap_sim.errors import RequestDoesNotFit
from dualmap_sim.prefix_cache import PrefixCache
from dualmap_sim.presets import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """What the engine needs to know of a request."""

    request_id: str
    prompt_tokens: int
    output_tokens: int
    """Tokens to generate, at least 1; the first comes from the prefill. A prefill-only engine stops after it."""
    blocks: Sequence[int] = ()
    """Chained hashes of the prompt's blocks of ``EngineConfig.block_tokens``; an incomplete last one is ignored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstToken:
    """A prefill ended, and with it the time to first token."""

    at_s: float
    request_id: str
    arrived_s: float
    prefill_started_s: float
    prompt_tokens: int
    cached_tokens: int
    decode_step: int
    """The engine's ``decode_steps`` at that moment: afterwards the request has one token more than steps since."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A request generated its last token."""

    at_s: float
    request_id: str
    arrived_s: float
    output_tokens: int


EngineEvent = FirstToken | Finished


class _State(Enum):
    WAITING = auto()
    PREFILLING = auto()
    DECODING = auto()
    GONE = auto()


class _Job:
    """One request on its way through the engine."""

    __slots__ = (
        "arrived_s",
        "cached_tokens",
        "finish_step",
        "joined_step",
        "need_tokens",
        "output_tokens",
        "prefill_started_s",
        "request",
        "state",
    )

    def __init__(self, request: EngineRequest, *, output_tokens: int, arrived_s: float) -> None:
        self.request = request
        self.output_tokens = output_tokens
        self.need_tokens = request.prompt_tokens + output_tokens
        self.arrived_s = arrived_s
        self.state = _State.WAITING
        self.prefill_started_s = inf
        self.cached_tokens = 0
        self.joined_step = 0
        self.finish_step = 0


class Engine:
    """The engine model. ``now`` is in seconds, from any origin, and never goes back."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.cache = PrefixCache(config.cache_tokens // config.block_tokens)
        self.now_s = -inf
        self.prompt_tokens_total = 0
        """Prompt tokens of all prefills started."""
        self.cached_tokens_total = 0
        """The part of them that the prefix cache held."""
        self._jobs: dict[str, _Job] = {}
        self._waiting: deque[_Job] = deque()
        self._waiting_count = 0
        self._prefilling: _Job | None = None
        self._run: DecodeRun | None = None
        self._end_s = inf
        # The batch, by the step that is each one's last; aborted ones stay in the heap until they come up.
        self._batch: list[tuple[int, int, _Job]] = []
        self._batch_count = 0
        self._leaving: list[_Job] = []
        self._joins = 0
        self._steps = 0
        self._generated = 0
        self._kv_reserved = 0
        self._kv_held = 0
        self._events: list[EngineEvent] = []

    @property
    def waiting(self) -> int:
        """Requests that have not begun their prefill."""
        return self._waiting_count

    @property
    def running(self) -> int:
        """Requests in prefill or decode."""
        return self._batch_count + (self._prefilling is not None)

    @property
    def kv_tokens_reserved(self) -> int:
        """KV tokens that admitted requests will hold at their end: what admission goes by."""
        return self._kv_reserved

    @property
    def kv_tokens_held(self) -> int:
        """KV tokens that admitted requests hold at the last ``now``; the prefix cache does not count."""
        prefilling = self._prefilling.request.prompt_tokens if self._prefilling is not None else 0
        return self._kv_held + prefilling + self._batch_count * self._steps_in_run()

    @property
    def decode_steps(self) -> int:
        """Decode steps completed at the last ``now``, ever: a decoding request gains one token with each."""
        return self._steps + self._steps_in_run()

    @property
    def generated_tokens_total(self) -> int:
        """Tokens generated at the last ``now``, ever, those of aborted requests included."""
        return self._generated + self._batch_count * self._steps_in_run()

    def cached_tokens(self, request: EngineRequest) -> int:
        """Return how many of the prompt's tokens a prefill beginning now would find in the cache.

        As in vLLM whole blocks only, and never the whole prompt: its last token is always computed, because the
        first output token comes from it.
        """
        whole = (request.prompt_tokens - 1) // self.config.block_tokens
        return self.cache.match(request.blocks[:whole]) * self.config.block_tokens

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
        output_tokens = request.output_tokens if self.config.decode is not None else 1
        job = _Job(request, output_tokens=output_tokens, arrived_s=now)
        if job.need_tokens > self.config.kv_memory_tokens:
            raise RequestDoesNotFit(needed_tokens=job.need_tokens, memory_tokens=self.config.kv_memory_tokens)
        self._run_until(now)
        self._jobs[request.request_id] = job
        self._waiting.append(job)
        self._waiting_count += 1
        self._look_at_queue(now)

    def abort(self, now: float, request_id: str) -> bool:
        """Give up on a request; True when it was still here, and then it will not be ``Finished``.

        A prefill stops at once and caches nothing. A decoding request holds its memory until the step ends.
        """
        self._run_until(now)
        job = self._jobs.pop(request_id, None)
        if job is None:
            return False
        if job.state is _State.WAITING:
            job.state = _State.GONE
            self._waiting_count -= 1
            self._look_at_queue(now)
        elif job.state is _State.PREFILLING:
            job.state = _State.GONE
            self._prefilling = None
            self._kv_reserved -= job.need_tokens
            self._start_next(now)
        else:
            self._leaving.append(job)
            if self._run is None:
                self._release_leaving()
            else:
                self._cut_run(now)
        return True

    def advance(self, now: float) -> list[EngineEvent]:
        """Let time pass until ``now``; return what has happened since the last call, in order of time."""
        self._run_until(now)
        events, self._events = self._events, []
        return events

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

    def _admissible(self) -> _Job | None:
        """Return the head of the queue if its memory is free."""
        while self._waiting and self._waiting[0].state is _State.GONE:
            self._waiting.popleft()
        if self._waiting:
            head = self._waiting[0]
            if self._kv_reserved + head.need_tokens <= self.config.kv_memory_tokens:
                return head
        return None

    def _cut_run(self, now: float) -> None:
        """End the run with the step under way: a step, once begun, is finished."""
        run = self._run
        assert run is not None
        done = run.done_at(now)
        run.steps = min(run.steps, done if run.end_of_s(done) >= now else done + 1)
        self._end_s = run.end_of_s(run.steps)
        self._run_until(now)

    def _start_next(self, now: float) -> None:
        job = self._admissible()
        if job is not None:
            self._waiting.popleft()
            self._start_prefill(job, now)
        elif self._batch_count:
            self._start_run(now)
        else:
            self._batch.clear()  # What is left are aborted requests whose last step will never come.
            self._end_s = inf

    def _start_prefill(self, job: _Job, now: float) -> None:
        self._waiting_count -= 1
        self._prefilling = job
        self._kv_reserved += job.need_tokens
        job.state = _State.PREFILLING
        job.prefill_started_s = now
        job.cached_tokens = self.cached_tokens(job.request)
        self.prompt_tokens_total += job.request.prompt_tokens
        self.cached_tokens_total += job.cached_tokens
        self._end_s = now + self.config.prefill.seconds(
            new_tokens=job.request.prompt_tokens - job.cached_tokens, cached_tokens=job.cached_tokens
        )

    def _end_prefill(self, job: _Job, now: float) -> None:
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
                decode_step=self._steps,
            )
        )
        if job.output_tokens == 1:
            self._kv_reserved -= job.need_tokens
            self._finish(job, now)
            return
        job.state = _State.DECODING
        job.joined_step = self._steps
        job.finish_step = self._steps + job.output_tokens - 1
        self._joins += 1
        heappush(self._batch, (job.finish_step, self._joins, job))
        self._batch_count += 1
        self._kv_held += request.prompt_tokens + 1

    def _start_run(self, now: float) -> None:
        assert self.config.decode is not None
        while self._batch[0][2].state is _State.GONE:
            heappop(self._batch)
        self._run = DecodeRun(
            self.config.decode,
            start_s=now,
            steps=self._batch[0][0] - self._steps,
            requests=self._batch_count,
            kv_tokens=self._kv_held,
        )
        self._end_s = self._run.end_of_s(self._run.steps)

    def _end_run(self) -> None:
        run, end_s = self._run, self._end_s
        assert run is not None
        self._run = None
        self._steps += run.steps
        self._generated += run.steps * self._batch_count
        self._kv_held += run.steps * self._batch_count
        self._release_leaving()
        while self._batch and self._batch[0][0] <= self._steps:
            job = heappop(self._batch)[2]
            if job.state is _State.DECODING:
                self._leave_batch(job)
                self._finish(job, end_s)

    def _release_leaving(self) -> None:
        for job in self._leaving:
            self._leave_batch(job)
        self._leaving.clear()

    def _leave_batch(self, job: _Job) -> None:
        job.state = _State.GONE
        self._batch_count -= 1
        self._kv_held -= job.request.prompt_tokens + 1 + self._steps - job.joined_step
        self._kv_reserved -= job.need_tokens

    def _finish(self, job: _Job, now: float) -> None:
        job.state = _State.GONE
        del self._jobs[job.request.request_id]
        self._events.append(
            Finished(
                at_s=now,
                request_id=job.request.request_id,
                arrived_s=job.arrived_s,
                output_tokens=job.output_tokens,
            )
        )
