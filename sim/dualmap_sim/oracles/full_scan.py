"""A router with complete and exact state that dispatches every request at once.

Each arrival goes to the instance with the lowest T_q + T_c, queue time plus prefill time (DualMap paper, eq. 1). T_q is
the engine's true backlog. T_c uses the engine's true cache at the beginning of the prefill, including blocks of earlier
prefills.
The rule considers one request at a time. So a policy that spreads prefixes ahead of time or queues requests can do
better. The rule does not predict completions, evictions or requests that wait for memory.
"""

from collections import Counter, deque
from collections.abc import Sequence
from itertools import islice

from dualmap_sim.engine import EngineRequest
from dualmap_sim.oracles.replay import HandOver, Instance
from dualmap_sim.records import Record


class FullScan:
    """Selects the lowest true TTFT; among equal values the lowest reserved KV, then the first instance."""

    def __init__(self, instances: Sequence[Instance]) -> None:
        self.instances = instances
        self._queues = [_Queue(instance) for instance in instances]

    def arrive(self, now: float, record: Record, hand_over: HandOver) -> None:
        """Submit a request at once."""
        work = record.arrival.work

        def cost(queue: _Queue) -> tuple[float, int]:
            return queue.ttft_s(now, work), queue.instance.engine.kv_tokens_reserved

        chosen = min(self._queues, key=cost)
        chosen.add(record)
        hand_over(record, chosen.instance)

    def changed(self, now: float, hand_over: HandOver) -> None:
        """Do nothing: this oracle has no queue."""


class _Queue:
    """An instance's requests that are not prefilled, in order, with their prefill times."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self._ahead: deque[tuple[Record, float]] = deque()
        self._blocks_ahead: Counter[int] = Counter()

    def ttft_s(self, now: float, work: EngineRequest) -> float:
        """Return the seconds until the first token of a request submitted now, rounded to a nanosecond."""
        self._drop_prefilled()
        engine = self.instance.engine
        busy_s = engine.backlog_s(now)
        # The engine computes its backlog with the current cache, and so overestimates the waiting requests' prefills.
        for record, prefill_s in islice(reversed(self._ahead), engine.waiting):
            busy_s += prefill_s - self.instance.prefill_s(record.arrival.work)
        return round(busy_s + self._prefill_s(work), 9)

    def add(self, record: Record) -> None:
        """Record a submitted request."""
        work = record.arrival.work
        self._ahead.append((record, self._prefill_s(work)))
        self._blocks_ahead.update(self._whole_blocks(work))

    def _drop_prefilled(self) -> None:
        while self._ahead and self._ahead[0][0].first_token_s is not None:
            record, _ = self._ahead.popleft()
            self._blocks_ahead.subtract(self._whole_blocks(record.arrival.work))
            if not self._ahead:
                self._blocks_ahead.clear()

    def _prefill_s(self, work: EngineRequest) -> float:
        engine = self.instance.engine
        reused = 0
        for block in work.blocks[: (work.prompt_tokens - 1) // engine.config.block_tokens]:
            if block not in engine.cache and not self._blocks_ahead[block]:
                break
            reused += 1
        cached_tokens = reused * engine.config.block_tokens
        return engine.config.prefill.seconds(new_tokens=work.prompt_tokens - cached_tokens, cached_tokens=cached_tokens)

    def _whole_blocks(self, work: EngineRequest) -> Sequence[int]:
        return work.blocks[: work.prompt_tokens // self.instance.engine.config.block_tokens]
