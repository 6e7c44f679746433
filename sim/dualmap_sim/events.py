"""The events of a cluster during a run, other than requests: values of ``ClusterConfig.events``."""

from dataclasses import dataclass

from dualmap.pools.pool import Pool
from dualmap_sim.presets import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolChange:
    """Every router receives a new version of the pool: members join, drain, leave or change their weight.

    A new member's engine starts with an empty cache. A removed member's engine finishes its requests. A member with an
    unchanged id and a changed address counts as new.
    """

    at_s: float
    pool: Pool


@dataclass(frozen=True, slots=True, kw_only=True)
class Fail:
    """A member's engine fails: its requests fail at once, and new requests fail until the engine recovers."""

    at_s: float
    member: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Recover:
    """A failed engine starts again, with an empty cache."""

    at_s: float
    member: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """A member's engine becomes slower or faster; its current step ends at the old speed.

    ``engine`` may change only the costs of prefill and decode, not memory or blocks.
    """

    at_s: float
    member: str
    engine: EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Forget:
    """A member's engine loses its cache without a report to the routers; its requests continue.

    So does an engine whose cache is reset, or which restarts while it is idle.
    """

    at_s: float
    member: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Bypass:
    """A member's engine caches a prompt that no router sent: traffic of another gateway takes a part of the cache."""

    at_s: float
    member: str
    blocks: tuple[int, ...]


Event = PoolChange | Fail | Recover | Speed | Forget | Bypass
