"""One queue and one cache for all instances: no request waits at a busy instance while another instance is free.

The DualMap paper's theoretical upper bound of reuse is one shared cache without a limit (section A.2.2). With a shared
queue, too, routing has no effect. So a policy's distance from this oracle is the loss by routing.

A policy can exceed this oracle in two cases. First, when the load exceeds the capacity, all requests of the single
queue are equally late, while unequal queues still serve some requests in time. Second, several instances may compute
the same prefix at the same time, before the prefix is cached. With one queue per instance, the later prompts wait and
reuse the prefix. The second case is rare for a trace of conversations on eight instances. The second case dominates for
a trace sped up for hundreds of instances. ``ForeseeingInstance`` removes the second case.

``waiting_lines`` defines the order of the queue.
"""

from collections.abc import Sequence
from dataclasses import replace

from dualmap_sim.engine import EngineRequest
from dualmap_sim.oracles.replay import HandOver, Instance
from dualmap_sim.oracles.waiting_lines import WaitingLine
from dualmap_sim.records import Record


class SingleQueue:
    """Sends the head of the queue to an instance that can start it at once. All requests wait until an instance can.

    An instance can start a request at once if no request waits or prefills there and the request's memory is free. The
    current decode step still ends first. Of several such instances, the oracle selects the instance with the lowest
    reserved KV, then the first.
    """

    def __init__(self, instances: Sequence[Instance], line: WaitingLine) -> None:
        self.instances = instances
        self._line = line

    def arrive(self, now: float, record: Record, hand_over: HandOver) -> None:
        """Queue a request, then start all requests that can start."""
        self._line.add(record)
        self.changed(now, hand_over)

    def changed(self, now: float, hand_over: HandOver) -> None:
        """Start all queued requests that can start."""
        while (record := self._line.head(now)) is not None:
            instance = self._that_can_start(record.arrival.work)
            if instance is None:
                return
            self._line.take()
            hand_over(record, instance)

    def _that_can_start(self, work: EngineRequest) -> Instance | None:
        # An idle engine that cannot start a request is too small for the request. The engine raises an error on
        # submission.
        able = (each for each in self.instances if each.engine.could_start(work) or not each.engine.running)
        return min(able, key=lambda each: each.engine.kv_tokens_reserved, default=None)


class ForeseeingInstance(Instance):
    """An instance with a shared cache that contains a prompt's blocks as soon as the prompt is submitted.

    In other instances the blocks are cached when the prefill ends. Until then, other prompts with the same prefix also
    compute these blocks. The cache must be unlimited: blocks found at submission must still be cached when the prefill
    begins.
    """

    __slots__ = ()

    def submit(self, now: float, work: EngineRequest, *, weighed: bool) -> None:
        """Submit a request. The engine reuses only the blocks that were cached before the submission."""
        cache = self.engine.cache
        found = cache.match(work.blocks)
        cache.insert(work.blocks[: work.prompt_tokens // self.engine.config.block_tokens])
        super().submit(now, replace(work, blocks=work.blocks[:found]), weighed=weighed)
