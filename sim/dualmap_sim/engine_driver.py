"""Drives one engine model in real time: model time runs ``speed`` times as fast as the wall clock.

In the simulated engine, only this module uses asyncio's clock. ``engine_server.py`` starts a Generation per request and
waits for its tokens. The driver has one timer for the engine, set to the model's next event.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from dualmap_sim.block_pool import EventBatch
from dualmap_sim.engine import Engine, EngineRequest, Finished, FirstToken
from dualmap_sim.metrics import EngineMetrics

TICK_S: Final = 0.02
"""Minimum wall-clock time between two wake-ups that serve only decode steps.

At speed 1 a step takes longer than this interval, so every chunk has one token. Faster engines put several tokens into
a chunk, as vLLM does under load. The interval never delays the first token or the end of a request.
"""


class Generation:
    """A request in the engine, with its progress for the HTTP handler."""

    __slots__ = (
        "_changed",
        "_waiter",
        "cached_tokens",
        "finish_reason",
        "finished",
        "joined_step",
        "pulled_tokens",
        "request_id",
        "tokens",
    )

    def __init__(self, request_id: str, *, finish_reason: str) -> None:
        self.request_id = request_id
        self.finish_reason = finish_reason
        self.tokens = 0
        self.cached_tokens = 0
        self.pulled_tokens = 0
        self.finished = False
        self.joined_step = 0
        self._changed = False
        self._waiter: asyncio.Future[None] | None = None

    @property
    def reused_tokens(self) -> int:
        """Prompt tokens that the engine did not compute. As in vLLM's usage, pulled tokens count as cached."""
        return self.cached_tokens + self.pulled_tokens

    async def changed(self) -> None:
        """Wait until ``tokens`` or ``finished`` has changed since the last call."""
        if not self._changed:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._changed = False

    def wake(self) -> None:
        """Wake the task that waits in ``changed``."""
        self._changed = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class EngineDriver:
    """An engine on the event loop. ``speed`` is the number of model seconds per wall-clock second.

    ``publish`` receives the KV events of each step, before the step's first tokens are delivered.
    """

    def __init__(
        self,
        engine: Engine,
        metrics: EngineMetrics,
        *,
        speed: float,
        publish: Callable[[EventBatch], None] | None = None,
    ) -> None:
        self._engine = engine
        self._publish = publish
        self._metrics = metrics
        self._speed = speed
        self._loop = asyncio.get_running_loop()
        self._origin_s = self._loop.time()
        self._generations: dict[str, Generation] = {}
        self._streaming: dict[str, Generation] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._ticked_s = self._origin_s

    def start(self, request: EngineRequest, *, stream: bool, finish_reason: str) -> Generation:
        """Submit a request; raises RequestDoesNotFit. With ``stream``, each token wakes the waiting task."""
        self._engine.submit(self._now(), request)
        generation = Generation(request.request_id, finish_reason=finish_reason)
        self._generations[request.request_id] = generation
        if stream:
            self._streaming[request.request_id] = generation
        self._arm()
        return generation

    def stop(self, generation: Generation) -> None:
        """Abort a generation that has not finished. Callers also call this method after a complete answer."""
        if self._generations.pop(generation.request_id, None) is not None:
            self._streaming.pop(generation.request_id, None)
            if self._engine.abort(self._now(), generation.request_id):
                self._metrics.aborted()
            self._arm()

    def release_kv(self, request_id: str) -> None:
        """Release the KV of an ended request with ``keeps_kv``."""
        self._engine.release_kv(self._now(), request_id)
        self._arm()

    def scrape(self) -> bytes:
        """Advance the engine to the current time and return its metrics page."""
        self._tick()
        return self._metrics.render()

    def _now(self) -> float:
        """Return the model time, which never decreases although timers may fire slightly early."""
        return max(self._engine.now_s, (self._loop.time() - self._origin_s) * self._speed)

    def _tick(self) -> None:
        self._ticked_s = self._loop.time()
        events = self._engine.advance(self._now())
        self._publish_events()
        for event in events:
            generation = self._generations.get(event.request_id)
            if generation is None:
                continue
            if isinstance(event, FirstToken):
                self._metrics.first_token(event)
                generation.cached_tokens = event.cached_tokens
                generation.pulled_tokens = event.pulled_tokens
                generation.joined_step = event.decode_step
                generation.tokens = 1
                generation.wake()
            else:
                self._finish(generation, event)
        steps = self._engine.decode_steps
        for generation in self._streaming.values():
            if generation.tokens:
                tokens = 1 + steps - generation.joined_step
                if tokens != generation.tokens:
                    generation.tokens = tokens
                    generation.wake()
        self._arm()

    def _finish(self, generation: Generation, event: Finished) -> None:
        self._metrics.finished(event, generation.finish_reason)
        del self._generations[event.request_id]
        self._streaming.pop(event.request_id, None)
        generation.tokens = event.output_tokens
        generation.finished = True
        generation.wake()

    def _publish_events(self) -> None:
        batches = self._engine.take_event_batches()
        if self._publish is not None:
            for batch in batches:
                self._publish(batch)

    def _arm(self) -> None:
        self._publish_events()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due_s = self._engine.next_event_s()
        if due_s is None:
            return
        when_s = self._origin_s + due_s / self._speed
        step_s = self._engine.next_step_s()
        if self._streaming and step_s is not None:
            when_s = min(when_s, max(self._origin_s + step_s / self._speed, self._ticked_s + TICK_S))
        self._timer = self._loop.call_at(when_s, self._tick)
