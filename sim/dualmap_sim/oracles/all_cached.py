"""The lower bound of TTFT: every request has its own engine with the full prompt cached.

The engine computes only the incomplete last block, or the last token. No cluster of such engines, of any size, serves a
request sooner.
"""

from dualmap_sim.engine import Engine
from dualmap_sim.oracles.replay import HandOver, Instance
from dualmap_sim.prefix_cache import PrefixCache
from dualmap_sim.presets import EngineConfig
from dualmap_sim.records import Record


class AllCached:
    """A new engine for each request, with the request's own blocks in its cache."""

    def __init__(self, engine: EngineConfig) -> None:
        self._engine = engine
        self.instances: tuple[Instance, ...] = ()

    def arrive(self, now: float, record: Record, hand_over: HandOver) -> None:
        """Submit a request at once."""
        work = record.arrival.work
        cache = PrefixCache(None)
        # No cache holds an incomplete block. If all blocks are complete, the engine still computes the last token.
        cache.insert(work.blocks[: work.prompt_tokens // self._engine.block_tokens])
        hand_over(record, Instance("alone", Engine(self._engine, cache=cache)))

    def changed(self, now: float, hand_over: HandOver) -> None:
        """Do nothing: this oracle has no queue."""
