"""One queue for all instances, and one cache: no request waits behind a wrong one or misses a cached prefix.

The paper's theoretical upper bound of reuse is one shared cache without a limit (section A.2.2). With a shared queue,
too, no choice of instance is left. So a policy's distance from this oracle is the loss by routing.

It is no bound in two cases. Beyond the knee all requests are equally late, while unequal queues still serve some in
time. Also, prompts with a common prefix that arrive close together are each computed in full, by several instances,
until the first is cached. With one queue per instance the later prompts wait and reuse it. The second
case is rare for a trace of conversations on eight instances, and dominates for a trace sped up for hundreds.
``ForeseeingInstance`` bounds it too.

``waiting_lines`` defines the order.
"""

from collections.abc import Sequence
from dataclasses import replace

from dualmap_sim.engine import EngineRequest
from dualmap_sim.oracles.replay import HandOver, Instance
from dualmap_sim.oracles.waiting_lines import WaitingLine
from dualmap_sim.records import Record


class SingleQueue:
    """The head of the queue goes to an instance that can start it at once; until there is one, all wait.

    "At once" means that nothing waits or is prefilled there and its memory fits; the current decode step still ends
    first. Of several such instances the one with the least KV reserved takes it, then the first.
    """

    def __init__(self, instances: Sequence[Instance], line: WaitingLine) -> None:
        self.instances = instances
        self._line = line

    def arrive(self, now: float, record: Record, hand_over: HandOver) -> None:
        """Queue a request, then start all that can start."""
        self._line.add(record)
        self.changed(now, hand_over)

    def changed(self, now: float, hand_over: HandOver) -> None:
        """Start all requests that can start."""
        while (record := self._line.head(now)) is not None:
            instance = self._that_can_start(record.arrival.work)
            if instance is None:
                return
            self._line.take()
            hand_over(record, instance)

    def _that_can_start(self, work: EngineRequest) -> Instance | None:
        # An idle engine that cannot start a request never will, and reports this on submission.
        able = (each for each in self.instances if each.engine.could_start(work) or not each.engine.running)
        return min(able, key=lambda each: each.engine.kv_tokens_reserved, default=None)


class ForeseeingInstance(Instance):
    """An instance whose shared cache contains a prompt's blocks from its submission on.

    Otherwise the blocks are cached at the end of its prefill, and until then other prompts with the same prefix compute
    them too. The cache must be unlimited: blocks found at submission must still be there when the prefill begins.
    """

    __slots__ = ()

    def submit(self, now: float, work: EngineRequest, *, weighed: bool) -> None:
        """Take a request. The engine's own lookup ends where the cached blocks ended before."""
        cache = self.engine.cache
        found = cache.match(work.blocks)
        cache.insert(work.blocks[: work.prompt_tokens // self.engine.config.block_tokens])
        super().submit(now, replace(work, blocks=work.blocks[:found]), weighed=weighed)
