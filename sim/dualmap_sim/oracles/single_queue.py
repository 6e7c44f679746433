"""One queue for all instances, and one cache: no request ever waits behind the wrong one or finds the wrong cache.

The paper's theoretical upper bound of reuse is one shared cache without a limit (section A.2.2). With the queue shared
too there is no choice of instance left to get wrong: what a policy loses against this, it loses by routing.

Two things it does not bound. Beyond the knee all are late alike, where unequal queues still serve some in time. And of
prompts that begin alike and come close together each is computed in full, by several instances side by side, until the
first of them is cached; one queue per instance has the later ones wait and reuse. That is rare on eight instances of a
trace of conversations and dominates where a trace is sped up for hundreds: ``ForeseeingInstance`` bounds that too.

``waiting_lines`` defines the order.
"""

from collections.abc import Sequence
from dataclasses import replace

from dualmap_sim.engine import EngineRequest
from dualmap_sim.oracles.replay import HandOver, Instance
from dualmap_sim.oracles.waiting_lines import WaitingLine
from dualmap_sim.records import Record


class SingleQueue:
    """The head of the line goes to an instance that can start it at once; until there is one, all wait.

    At once means that nothing waits or is prefilled there and its memory fits; a decode step under way still ends
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
        # An idle engine that cannot start a request never will, and says so when it is given it.
        able = (each for each in self.instances if each.engine.could_start(work) or not each.engine.running)
        return min(able, key=lambda each: each.engine.kv_tokens_reserved, default=None)


class ForeseeingInstance(Instance):
    """An instance whose shared cache has a prompt's blocks from when the prompt is handed over.

    Otherwise they come with the end of its prefill, and until then others that begin alike compute them too. The cache
    must be without a limit: what a prompt finds at its hand-over has to be there when its prefill begins.
    """

    __slots__ = ()

    def submit(self, now: float, work: EngineRequest, *, weighed: bool) -> None:
        """Take a request. Its own lookup ends where the cache did before."""
        cache = self.engine.cache
        found = cache.match(work.blocks)
        cache.insert(work.blocks[: work.prompt_tokens // self.engine.config.block_tokens])
        super().submit(now, replace(work, blocks=work.blocks[:found]), weighed=weighed)
