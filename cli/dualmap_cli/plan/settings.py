"""The pool's settings that a plan would change, with the gain of each."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from math import inf
from typing import Final

from dualmap.pools.pool import Pool
from dualmap_cli.simulate.pool_option import of_pool
from dualmap_sim.experiment import Experiment
from dualmap_sim.planning.capacity import Capacity
from dualmap_sim.planning.intervals import Share
from dualmap_sim.planning.sizes import Fleet
from dualmap_sim.presets import EngineConfig

_LEAST_GAIN: Final = 0.005
"""A smaller gain of a changed setting is not proposed."""
_DISPATCH_WINDOWS_S: Final = (0.1, 0.25, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A changed field of the pool, and its ``gain`` in attainment with the same instances. Values are shown as text."""

    field: str
    now: str
    proposed: str
    gain: Share


def changes(
    pool: Pool, base: Experiment, capacity: Capacity, engine: EngineConfig, known: Collection[str], fleet: Fleet
) -> tuple[Change, ...]:
    """Return the changed settings that certainly attain more: the best value of each field, the largest gain first.

    ``base`` has the settings of ``pool``. ``known`` are the parameters of ``engine`` that a fit found.
    """
    best: dict[str, Change] = {}
    for field, now, proposed, other in _candidates(pool, engine, known):
        changed = replace(of_pool(base, other), policy=other.routing.policy, block_tokens=base.block_tokens)
        gain = capacity.gain(changed, fleet)
        if (
            gain is not None
            and gain.value >= _LEAST_GAIN
            and (field not in best or gain.value > best[field].gain.value)
        ):
            best[field] = Change(field=field, now=now, proposed=proposed, gain=gain)
    return tuple(sorted(best.values(), key=lambda change: -change.gain.value))


def _candidates(pool: Pool, engine: EngineConfig, known: Collection[str]) -> Iterator[tuple[str, str, str, Pool]]:
    """Yield changed pools, each with its field, its value now and the changed value."""
    routing, queue = pool.routing, pool.routing.queue
    if routing.policy != "dualmap":
        yield (
            "spec.routing.policy",
            routing.policy,
            "dualmap",
            replace(pool, routing=replace(routing, policy="dualmap")),
        )
    for window_s in _DISPATCH_WINDOWS_S:
        if window_s != queue.dispatch_window_s:
            changed = replace(routing, queue=replace(queue, dispatch_window_s=window_s))
            yield (
                "spec.routing.queue.dispatchWindow",
                _duration(queue.dispatch_window_s),
                _duration(window_s),
                replace(pool, routing=changed),
            )
    believed = pool.engine
    for name, field, now, proposed, changed_engine in (
        (
            "r",
            "spec.engine.prefillTokensPerSecond",
            f"{believed.prefill_tokens_per_second:g}",
            f"{engine.prefill.tokens_per_s:.0f}",
            replace(believed, prefill_tokens_per_second=engine.prefill.tokens_per_s),
        ),
        (
            "c",
            "spec.engine.cacheTokens",
            f"{believed.cache_tokens}",
            f"{engine.cache_tokens}",
            replace(believed, cache_tokens=engine.cache_tokens),
        ),
    ):
        if name in known and now != proposed:
            yield field, now, proposed, replace(pool, engine=changed_engine)


def _duration(seconds: float) -> str:
    """Return a duration as a pool's object has it."""
    if seconds == inf:
        return "Unlimited"
    return f"{seconds:g}s" if seconds >= 1 else f"{1000 * seconds:g}ms"
