"""The events of a cluster during a run, besides requests: values of ``ClusterConfig.events``."""

from dataclasses import dataclass

from dualmap.pools.pool import Pool
from dualmap_sim.presets import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolChange:
    """Every router gets a new version of the pool: members join, drain, leave, change their weight.

    A new member's engine starts cold; a removed member's engine finishes its requests. A member with another address
    under the same id is a new one.
    """

    at_s: float
    pool: Pool


@dataclass(frozen=True, slots=True, kw_only=True)
class Fail:
    """A member's engine dies: its requests fail at once, and so do new ones until it recovers."""

    at_s: float
    member: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Recover:
    """A dead member's engine starts again, with an empty cache."""

    at_s: float
    member: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """A member's engine becomes slower or faster; its current step ends at the old speed.

    Only the costs of prefill and decode may differ from the member's engine, not memory or blocks.
    """

    at_s: float
    member: str
    engine: EngineConfig


Event = PoolChange | Fail | Recover | Speed
