"""The routers of the pools that this process serves, by pool and by model, and the queries over all pools."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from dualmap.ownership.messages import Message
from dualmap.pools.claims import Claimant, prefill_pools, prefill_problem
from dualmap.pools.pool import Pool, TokenSource
from dualmap.prompts.prompt import MAX_NAME
from dualmap.remote_prefills import Outcomes
from dualmap.requests import PoolSnapshot
from dualmap.router import PoolRouter
from dualmap.shared_router import RemoteDecision, Router, SharedRouter
from dualmap_extproc.names import FAIRNESS_HEADER, OBJECTIVE_HEADER
from dualmap_extproc.request.reading import Bounds, BoundsOfModels


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """This process among the other routers: its name, and the functions that its pools' routers use.

    ``send`` takes a pool, the name of a router and the message to this router. ``decided`` takes a pool and how one of
    its decisions was made of which another router is the owner. ``owner_changed`` takes a pool, its last owner and its
    new one.
    """

    name: str
    send: Callable[[str, str, Message], None]
    decided: Callable[[str, RemoteDecision], None]
    owner_changed: Callable[[str, str, str], None]


class ServedPools:
    """The routers of all pools. With ``replicated``, the pools' routers store replication updates for other
    replicas. ``hash_key`` and ``epoch_s`` are as for ``PoolRouter``. With a ``mesh``, each pool has an owner among the
    routers.

    A pool serves the names of its specification, and the adapters that its engines serve. A name of a specification
    always goes to the pool that specifies it. A pool that prefills for another pool serves no names.
    """

    def __init__(self, *, replicated: bool, hash_key: bytes, epoch_s: float = 0.0, mesh: Mesh | None = None) -> None:
        self._replicated = replicated
        self._hash_key = hash_key
        self._epoch_s = epoch_s
        self._mesh = mesh
        self._queues = True
        # The routers that may own pools, for the routers of new pools.
        self._owners: tuple[str, ...] = ()
        self._routers: dict[str, Router] = {}
        # The pools as they were given; a router's pool also contains what its engines say.
        self._given: tuple[Pool, ...] = ()
        self._models: dict[str, Router] = {}
        # The usable prefill pool of each pool that names one.
        self._prefill_routers: dict[str, Router] = {}
        self._addressed: tuple[Router, ...] = ()
        self.known = False
        """Whether ``replace`` was called, perhaps without pools. Before, any model may have a pool."""
        self._departed: dict[str, frozenset[str]] = {}
        self.session_headers: frozenset[str] = frozenset()
        """The lower-case names of the headers that identify sessions, over all pools."""
        self.client_headers: frozenset[str] = frozenset()
        """The lower-case names of the headers that identify clients, over all pools."""
        self.objective_headers: frozenset[str] = frozenset()
        """The lower-case names of the headers that select priorities, over all pools."""
        self.bounds: BoundsOfModels = {}
        """The bounds on request bodies, by model."""
        self.max_body_bytes: int | None = None
        """The largest request body that any pool accepts; None without pools."""

    def __iter__(self) -> Iterator[Router]:
        return iter(tuple(self._routers.values()))

    @property
    def pools(self) -> tuple[Pool, ...]:
        """The pools of the last ``replace``, in their order."""
        return self._given

    @property
    def only(self) -> Router | None:
        """The router of the only pool that clients address, or None if there are several or none."""
        return self._addressed[0] if len(self._addressed) == 1 else None

    def router(self, pool: str) -> Router | None:
        """Return the router of a pool (``namespace/name``), or None if this process does not serve the pool."""
        return self._routers.get(pool)

    def prefill_router(self, pool: str) -> Router | None:
        """Return the router of the pool that prefills for ``pool``, or None if it has no usable prefill pool."""
        return self._prefill_routers.get(pool)

    def of_model(self, model: str) -> Router | None:
        """Return the router of the pool that serves a model, or None if no pool serves the model.

        A pool without a model's name serves any name of at most MAX_NAME characters.
        """
        router = self._models.get(model)
        return self._models.get("") if router is None and len(model) <= MAX_NAME else router

    def queue_no_more(self) -> None:
        """Disable queueing in all pools, starting at the next ``replace``."""
        self._queues = False

    def shared(self) -> Iterator[SharedRouter]:
        """Yield the routers of pools that have an owner among the routers."""
        return (each for each in tuple(self._routers.values()) if isinstance(each, SharedRouter))

    def shared_router(self, pool: str) -> SharedRouter | None:
        """Return the router of a pool that has an owner among the routers; None for other pools."""
        router = self._routers.get(pool)
        return router if isinstance(router, SharedRouter) else None

    def set_owners(self, now: float, names: Collection[str]) -> list[Outcomes]:
        """Take the names of the routers that may own pools; return the outcomes of this router's requests."""
        self._owners = tuple(names)
        return [(each, each.on_routers(now, self._owners).outcomes) for each in self.shared()]

    def replace(self, now: float, pools: Sequence[Pool]) -> tuple[frozenset[str], list[Outcomes]]:
        """Replace the pools; return the ids of removed pools, and the outcomes of queued requests in other pools.

        A pool that stays keeps its router. If two pools have the same model, the first pool serves it.
        """
        self.known = True
        routers: dict[str, Router] = {}
        effects: list[Outcomes] = []
        before = {pool.id: pool for pool in self._given}
        self._given = tuple(pool if self._queues else pool.never_queueing() for pool in pools)
        for pool in self._given:
            router = self._routers.get(pool.id)
            if router is None:
                router = self._new(now, pool)
            elif before[pool.id] != pool:
                effects.append((router, router.on_pool(now, pool).outcomes))
            routers[pool.id] = router
        removed = frozenset(self._routers.keys() - routers.keys())
        for each in self.shared():
            if each.pool.id in removed:
                each.leave(now)
        self._routers = routers
        self.session_headers = frozenset(pool.routing.session.header.lower() for pool in pools)
        named = (pool.routing.fairness.header for pool in pools)
        self.client_headers = frozenset((FAIRNESS_HEADER, *(header for header in named if header)))
        has_objectives = any(pool.objectives.priorities for pool in pools)
        self.objective_headers = frozenset((OBJECTIVE_HEADER,) if has_objectives else ())
        self.name_pools()
        self.max_body_bytes = max((pool.routing.max_body_bytes for pool in pools), default=None)
        return removed, effects

    def name_pools(self) -> None:
        """Map every model name to its pool again, after a pool or what its engines say has changed."""
        models: dict[str, Router] = {}
        addressed = self._find_prefill_pools()
        for pool in addressed:
            for name in pool.served_names:
                models.setdefault(name, self._routers[pool.id])
        # The names of specifications come first, so that no engine can take them.
        for pool in addressed:
            router = self._routers[pool.id]
            for name in router.pool.model.names:
                if name not in pool.foreign_names:
                    models.setdefault(name, router)
        self._models = models
        self.bounds = {name: _bounds(router.pool) for name, router in models.items()}

    def _find_prefill_pools(self) -> tuple[Pool, ...]:
        """Find the prefill pool of each pool; return the pools that clients address."""
        claimants = {pool.id: Claimant.of(pool, "") for pool in self._given}
        prefilling = prefill_pools(claimants)
        self._prefill_routers = {
            pool: self._routers[claimant.prefill_pool]
            for pool, claimant in claimants.items()
            if claimant.prefill_pool and not prefill_problem(claimant, claimants)
        }
        self._addressed = tuple(router for pool, router in self._routers.items() if pool not in prefilling)
        return tuple(pool for pool in self._given if pool.id not in prefilling)

    def take_departed(self) -> list[tuple[str, frozenset[str]]]:
        """Return the members whose time to leave has passed since the last call, by pool."""
        before, self._departed = self._departed, {pool: each.departed for pool, each in self._routers.items()}
        new = ((pool, members - before.get(pool, frozenset())) for pool, members in self._departed.items())
        return [(pool, members) for pool, members in new if members]

    def next_deadline(self) -> float | None:
        """Return the time at which any router's ``on_deadline`` is due next, or None."""
        deadlines = [router.next_deadline() for router in self._routers.values()]
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def statuses(self, pools: Collection[str] | None) -> tuple[PoolSnapshot, ...]:
        """Return the current status of each pool, or only of the served pools in ``pools``."""
        return tuple(router.status() for name, router in self._routers.items() if pools is None or name in pools)

    def _new(self, now: float, pool: Pool) -> Router:
        """Return the router of a new pool."""
        mesh = self._mesh
        if mesh is None:
            return PoolRouter(pool, replicated=self._replicated, hash_key=self._hash_key, epoch_s=self._epoch_s)
        router = SharedRouter(
            pool,
            name=mesh.name,
            send=partial(mesh.send, pool.id),
            decided=partial(mesh.decided, pool.id),
            owner_changed=partial(mesh.owner_changed, pool.id),
            hash_key=self._hash_key,
            replicated=self._replicated,
            epoch_s=self._epoch_s,
        )
        router.on_routers(now, self._owners)
        return router

    def demands(self, pools: Collection[str] | None) -> tuple[PoolSnapshot, ...]:
        """Do the same as ``statuses`` for this router's own requests only, whichever router accounts for them."""
        return tuple(
            router.demand() if isinstance(router, SharedRouter) else router.status()
            for name, router in self._routers.items()
            if pools is None or name in pools
        )


def _bounds(pool: Pool) -> Bounds:
    wanted = pool.engine.tokenizer
    return Bounds(
        body_bytes=pool.routing.max_body_bytes,
        tokens=pool.engine.max_model_len,
        tokenizer=wanted.path if wanted.source is TokenSource.FILES else "",
    )
