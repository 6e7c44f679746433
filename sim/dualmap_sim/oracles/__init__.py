"""Oracles: bounds for routers. An oracle has the true state of all caches, queues and prompt costs.

Oracles replay the same arrivals on the same engine model as ``cluster`` and write the same records. So ``summary``
measures oracles and policies alike. The distance of a policy from the oracle ``limit`` is the possible gain of better
routing. A router that defers late requests can pass ``limit``; its bound is ``limit_deadline``.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from dualmap_sim.arrivals import Arrival
from dualmap_sim.engine import Engine
from dualmap_sim.oracles.all_cached import AllCached
from dualmap_sim.oracles.full_scan import FullScan
from dualmap_sim.oracles.replay import Discipline, Instance, OracleRun, Replay
from dualmap_sim.oracles.single_queue import ForeseeingInstance, SingleQueue
from dualmap_sim.oracles.waiting_lines import PASSED_OVER_MAX, HopefulFirst, InOrder
from dualmap_sim.prefix_cache import PrefixCache
from dualmap_sim.presets import EngineConfig
from dualmap_sim.records import Record

__all__ = ["ORACLES", "OracleInfo", "OracleRun", "run_oracle"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """The configuration of an oracle: ``instances`` equal engines, and an SLO."""

    engine: EngineConfig
    instances: int
    slo_ttft_s: float

    def members(self, cache: PrefixCache | None = None, kind: type[Instance] = Instance) -> tuple[Instance, ...]:
        """Return new instances that share ``cache``. Without ``cache``, each instance has its own cache."""
        return tuple(kind(f"instance-{number}", Engine(self.engine, cache=cache)) for number in range(self.instances))

    def pooled_cache(self) -> PrefixCache:
        """Return one cache as large as all instances' caches together."""
        return PrefixCache(self.instances * self.engine.cache_tokens // self.engine.block_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class OracleInfo:
    """An oracle's name and source. ``build`` creates an oracle for a run."""

    name: str
    source: str
    summary: str
    build: Callable[[Pool], Discipline]


def run_oracle(
    name: str,
    *,
    engine: EngineConfig,
    instances: int,
    arrivals: Sequence[Arrival],
    slo_ttft_s: float = 5.0,
    gives_up: Callable[[Record], bool] | None = None,
    sample_s: float | None = None,
) -> OracleRun:
    """Replay requests, in order of arrival, on ``instances`` engines under an oracle of ``ORACLES``.

    The replay calls ``gives_up`` at each first token; the result True ends the run. Some oracles use the SLO to order
    requests. Raises RequestDoesNotFit for a request larger than an engine's memory.
    """
    discipline = ORACLES[name].build(Pool(engine=engine, instances=instances, slo_ttft_s=slo_ttft_s))
    return Replay(discipline, gives_up=gives_up, sample_s=sample_s).run(arrivals)


def _limit(pool: Pool) -> Discipline:
    return SingleQueue(pool.members(PrefixCache(None)), InOrder())


def _limit_ideal(pool: Pool) -> Discipline:
    return SingleQueue(pool.members(PrefixCache(None), ForeseeingInstance), InOrder())


def _limit_pooled(pool: Pool) -> Discipline:
    return SingleQueue(pool.members(pool.pooled_cache()), InOrder())


def _limit_deadline(pool: Pool) -> Discipline:
    """Return the bound of the share within the SLO, for policies that serve late requests as well.

    Three properties make it a bound. Every block that was computed stays cached for all instances, so prefills are as
    short as they can be. No instance is free while a request waits that fits into its memory. Requests that cannot meet
    the SLO give way, and the others go in the order of their deadlines. For prefills of equal length, no other order
    that serves as many late requests has more requests in time.

    It is not a theorem. With prefills of different lengths, an order that puts the longest off can serve more. A policy
    with one queue per instance may serve fewer late requests, and a policy may wait for a prefix that another instance
    computes. No policy passes it in any recorded goodput. Well below the goodput, where few requests are late, policies
    can pass it by a few requests in a thousand (``python -m bench paper --section gap``).
    """
    return _hopeful_first(pool, PrefixCache(None))


def _pooled_deadline(pool: Pool) -> Discipline:
    """Return ``limit_deadline`` with as much cache as the instances have: nearer to what a router can reach."""
    return _hopeful_first(pool, pool.pooled_cache())


def _hopeful_first(pool: Pool, cache: PrefixCache) -> Discipline:
    instances = pool.members(cache)
    # All instances share the cache, so every instance predicts the same prefill time.
    return SingleQueue(instances, HopefulFirst(instances[0].prefill_s, slo_ttft_s=pool.slo_ttft_s))


ORACLES: Final[Mapping[str, OracleInfo]] = MappingProxyType(
    {
        info.name: info
        for info in (
            OracleInfo(
                name="limit",
                source="DualMap, section A.2.2 (one shared cache without a limit); here the queue is shared too",
                summary="One cache without a limit and one queue for all instances, first come, first served.",
                build=_limit,
            ),
            OracleInfo(
                name="limit_ideal",
                source="limit, but concurrent requests never compute the same block twice",
                summary="As limit, but a prompt's blocks count as cached once it starts, so each is computed once.",
                build=_limit_ideal,
            ),
            OracleInfo(
                name="limit_pooled",
                source="limit, with a cache of the instances' real size",
                summary="One LRU cache as large as all instances' together, one queue, first come, first served.",
                build=_limit_pooled,
            ),
            OracleInfo(
                name="limit_deadline",
                source="limit, with another queue order",
                summary="As limit, but requests that can still meet the SLO go first; "
                f"the oldest is overtaken at most {PASSED_OVER_MAX} times in a row.",
                build=_limit_deadline,
            ),
            OracleInfo(
                name="pooled_deadline",
                source="limit_deadline, with a cache of the instances' real size",
                summary="As limit_deadline, with the cache of limit_pooled.",
                build=_pooled_deadline,
            ),
            OracleInfo(
                name="full_scan_oracle",
                source="DualMap, eq. 1, over all instances and with the true T_q and T_c",
                summary="Sends each request at once to the instance with the lowest true T_q + T_c.",
                build=lambda pool: FullScan(pool.members()),
            ),
            OracleInfo(
                name="all_cached",
                source="a lower bound of TTFT: no queue, everything cached",
                summary="One engine for each request, with the prompt cached: no TTFT is lower.",
                build=lambda pool: AllCached(pool.engine),
            ),
        )
    }
)
"""All oracles, by name."""
