"""The engines of a simulated cluster's members. Members may join, leave, fail, and change their speed.

``cluster`` submits requests to the engines and advances them. ``engine.Engine`` is the engine model.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import inf

from dualmap.pools.pool import Pool
from dualmap_sim.block_pool import BlockPool
from dualmap_sim.engine import Engine, EngineRequest
from dualmap_sim.presets import EngineConfig


class Instance:
    """One engine from its start to its end. A member that leaves and returns gets a new instance."""

    __slots__ = ("alive", "engine", "live", "member", "pending_tokens", "wakes_s")

    def __init__(self, member: str, engine: Engine) -> None:
        self.member = member
        self.engine = engine
        self.alive = True
        # The time of the next ``advance``. Wake-ups scheduled for other times have no effect.
        self.wakes_s = inf
        # The unfinished requests, each with its share of `pending_tokens`.
        self.live: dict[str, int] = {}
        self.pending_tokens = 0

    def submit(self, now: float, work: EngineRequest, *, weighed: bool) -> None:
        """Submit a request. With ``weighed``, the uncomputed tokens count as pending, which needs a cache lookup."""
        uncomputed = 0
        if weighed:
            uncomputed = work.prompt_tokens - max(self.engine.cached_tokens(work), work.pulled_tokens)
            self.pending_tokens += uncomputed
        self.live[work.request_id] = uncomputed
        self.engine.submit(now, work)

    def prefilled(self, request_id: str) -> None:
        """Remove a request's prompt from the pending tokens."""
        self.pending_tokens -= self.live[request_id]
        self.live[request_id] = 0

    def ended(self, request_id: str) -> None:
        """Remove a request that ended."""
        del self.live[request_id]

    def die(self) -> tuple[str, ...]:
        """Stop the engine, drop all requests, and return the unfinished requests."""
        dropped = tuple(self.live)
        self.alive, self.wakes_s = False, inf
        self.live.clear()
        self.pending_tokens = 0
        return dropped


class Instances:
    """The instances of a pool's current members. An instance of a removed member exists until its requests end.

    With ``kv_events``, the engines have physical blocks and report KV events.
    """

    def __init__(
        self, pool: Pool, *, engine: EngineConfig, engines: Mapping[str, EngineConfig], kv_events: bool = False
    ) -> None:
        self._kv_events = kv_events
        self._engine = engine
        self._engines = dict(engines)
        self._at: dict[str, Instance] = {}
        self._endpoints: dict[str, str] = {}
        self.adopt(pool)

    def __iter__(self) -> Iterator[Instance]:
        """Iterate over the instances of the pool's current members."""
        return iter(self._at.values())

    def at(self, endpoint: str) -> Instance:
        """Return the instance at an ``ip:port`` of the pool."""
        return self._at[endpoint]

    def find(self, endpoint: str) -> Instance | None:
        """Return the instance at an ``ip:port``; None if no member of the pool has it."""
        return self._at.get(endpoint)

    def adopt(self, pool: Pool) -> None:
        """Apply a new version of the pool. The engines of new members start with an empty cache."""
        present, self._at, self._endpoints = self._at, {}, {}
        for member in pool.members:
            instance = present.get(member.endpoint)
            self._at[member.endpoint] = self._start(member.id) if instance is None else instance
            self._endpoints[member.id] = member.endpoint

    def of(self, member: str) -> Instance:
        """Return the instance of a member of the pool."""
        return self._at[self._endpoints[member]]

    def recover(self, member: str) -> None:
        """Restart a member's engine if it has failed."""
        endpoint = self._endpoints[member]
        if not self._at[endpoint].alive:
            self._at[endpoint] = self._start(member)

    def change_speed(self, member: str, engine: EngineConfig) -> None:
        """Change the costs of a member's engine, starting with its next prefill or decode run."""
        self._engines[member] = engine
        changed = self._at[self._endpoints[member]].engine
        config = changed.config
        assert engine == replace(config, prefill=engine.prefill, decode=engine.decode), "only speeds may change"
        assert (engine.decode is None) == (config.decode is None), "an engine either decodes or it does not"
        changed.config = engine

    def pending_tokens(self) -> dict[str, int]:
        """Return each member's tokens that were submitted but not prefilled, by member id."""
        return {member: self._at[endpoint].pending_tokens for member, endpoint in self._endpoints.items()}

    def _start(self, member: str) -> Instance:
        config = self._engines.get(member, self._engine)
        if not self._kv_events:
            return Instance(member, Engine(config))
        pool = BlockPool(config.cache_tokens // config.block_tokens, block_tokens=config.block_tokens)
        return Instance(member, Engine(config, cache=pool))
