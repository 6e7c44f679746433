"""The routers of the pools that this process serves, by pool and by model, and the queries over all pools."""

from collections.abc import Collection, Iterator, Sequence

from dualmap.pools.pool import Pool
from dualmap.requests import Outcome, PoolSnapshot
from dualmap.router import PoolRouter
from dualmap_extproc.names import FAIRNESS_HEADER
from dualmap_extproc.request.reading import Bounds, BoundsOfModels

Outcomes = tuple[PoolRouter, tuple[Outcome, ...]]
"""A pool's router, and the outcomes of queued requests from one event of the router."""


class ServedPools:
    """The routers of all pools. With ``replicated``, the pools' routers store replication updates for other
    replicas."""

    def __init__(self, *, replicated: bool) -> None:
        self._replicated = replicated
        self._queues = True
        self._routers: dict[str, PoolRouter] = {}
        self._models: dict[str, PoolRouter] = {}
        self.session_headers: frozenset[str] = frozenset()
        """The lower-case names of the headers that identify sessions, over all pools."""
        self.client_headers: frozenset[str] = frozenset()
        """The lower-case names of the headers that identify clients, over all pools."""
        self.bounds: BoundsOfModels = {}
        """The bounds on request bodies, by model."""
        self.max_body_bytes: int | None = None
        """The largest request body that any pool accepts; None without pools."""

    def __iter__(self) -> Iterator[PoolRouter]:
        return iter(tuple(self._routers.values()))

    @property
    def pools(self) -> tuple[Pool, ...]:
        """The pools of the last ``replace``, in their order."""
        return tuple(router.pool for router in self._routers.values())

    @property
    def only(self) -> PoolRouter | None:
        """The router of the only pool, or None if there are several pools or none."""
        return next(iter(self._routers.values())) if len(self._routers) == 1 else None

    def router(self, pool: str) -> PoolRouter | None:
        """Return the router of a pool (``namespace/name``), or None if this process does not serve the pool."""
        return self._routers.get(pool)

    def of_model(self, model: str) -> PoolRouter | None:
        """Return the router of the pool that serves a model, or None if no pool serves the model."""
        return self._models.get(model)

    def queue_no_more(self) -> None:
        """Disable queueing in all pools, starting at the next ``replace``."""
        self._queues = False

    def replace(self, now: float, pools: Sequence[Pool]) -> tuple[frozenset[str], list[Outcomes]]:
        """Replace the pools; return the ids of removed pools, and the outcomes of queued requests in other pools.

        A pool that stays keeps its router. If two pools have the same model, the first pool serves it.
        """
        routers: dict[str, PoolRouter] = {}
        models: dict[str, PoolRouter] = {}
        effects: list[Outcomes] = []
        for given in pools:
            pool = given if self._queues else given.never_queueing()
            router = self._routers.get(pool.id)
            if router is None:
                router = PoolRouter(pool, replicated=self._replicated)
            elif router.pool != pool:
                effects.append((router, router.on_pool(now, pool).outcomes))
            routers[pool.id] = router
            for name in pool.served_names:
                models.setdefault(name, router)
        removed = frozenset(self._routers.keys() - routers.keys())
        self._routers, self._models = routers, models
        self.session_headers = frozenset(pool.routing.session.header.lower() for pool in pools)
        named = (pool.routing.fairness.header for pool in pools)
        self.client_headers = frozenset((FAIRNESS_HEADER, *(header for header in named if header)))
        self.bounds = {name: _bounds(router.pool) for name, router in models.items()}
        self.max_body_bytes = max((pool.routing.max_body_bytes for pool in pools), default=None)
        return removed, effects

    def next_deadline(self) -> float | None:
        """Return the time at which any router's ``on_deadline`` is due next, or None."""
        deadlines = [router.next_deadline() for router in self._routers.values()]
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def statuses(self, pools: Collection[str] | None) -> tuple[PoolSnapshot, ...]:
        """Return the current status of each pool, or only of the served pools in ``pools``."""
        return tuple(router.status() for name, router in self._routers.items() if pools is None or name in pools)


def _bounds(pool: Pool) -> Bounds:
    return Bounds(body_bytes=pool.routing.max_body_bytes, tokens=pool.engine.max_model_len)
