"""What a simulated engine says about itself, as the router's discovery (``spec.engine.discovery``) reads it.

``metrics`` renders the same facts as vLLM's metrics page. A cluster passes them to its routers directly, because a page
for every engine and second would take most of a run's time. A cluster's engines do not report when they started.
"""

from typing import Final

from dualmap.engines.profile import EngineProfile
from dualmap_sim.engine import Engine

LOAD_EVERY_S: Final = 1.0
"""The time between two questions to an engine, as in production."""


def profile_of(engine: Engine, now: float) -> EngineProfile:
    """Return what an engine reports at ``now``, to which it has advanced."""
    config = engine.config
    # An engine keeps one block as a placeholder.
    cache_tokens = max(0, config.cache_tokens // config.block_tokens - 1) * config.block_tokens
    return EngineProfile(
        engine="vLLM",
        block_tokens=config.block_tokens,
        kv_tokens=min(engine.memory_tokens, cache_tokens) if cache_tokens else engine.memory_tokens,
        cache_tokens=cache_tokens,
        waiting=engine.waiting,
        running=engine.running,
        kv_usage=engine.kv_tokens_held / engine.memory_tokens,
        ranks=(0,),
        asleep=False,
        at_s=now,
    )
