"""Watches InferencePools and their pods in the Kubernetes API, and reports the pools to serve.

There is one watch for all pools, one watch for the pods of each pool, and one task that reports changes.
``dualmap_edge.kube.watch`` keeps collections up to date. The modules ``objects`` and ``pods`` hold the collections'
state. ``dualmap.objects`` reads the fields of the objects. The router only lists and watches ``inferencepools``,
``pods`` and the ConfigMap with the reserved model names; it writes nothing to Kubernetes.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from dualmap.objects.pods import PodFacts, mapping_in, pod_facts
from dualmap.objects.pool_reader import API_VERSION
from dualmap.objects.reservations import CONFIG_MAP, read_reservations
from dualmap.pools.pool import Pool
from dualmap_edge.kube.client import KubeClient, KubeError
from dualmap_edge.kube.watch import Collection, Reflector, WatchPolicy
from dualmap_edge.logs import clipped, get_logger
from dualmap_extproc.pools.changes import log_changes
from dualmap_extproc.pools.objects import InvalidPool, PoolObjects
from dualmap_extproc.pools.pods import PoolPods

POOLS: Final = "inferencepools"
PODS: Final = "pods"
CONFIG_MAPS: Final = "configmaps"
WATCH_POLICY: Final = WatchPolicy(jitter=0.5)
_log = get_logger(__name__)


class KubePoolsObserver(Protocol):
    """The counters of lists and failures; ``pools.metrics`` implements this interface."""

    def kube_listed(self, resource: str) -> None:
        """Count a list of a collection."""

    def kube_failed(self, resource: str, kind: str) -> None:
        """Count a list or watch that failed: ``unreached``, ``refused`` or ``expired``."""

    def pools_refused(self) -> None:
        """Count an invalid change of a pool."""

    def kube_pools_refused(self, count: int) -> None:
        """Set the current number of invalid pools."""


@dataclass(slots=True, kw_only=True)
class _PodWatch:
    """The watch of one pool's pods, and the members that are excluded because of their pods."""

    selector: str
    pods: PoolPods
    reflector: Reflector[PodFacts]
    task: asyncio.Task[None]
    left_out: list[str] = field(default_factory=list)


class KubePools:
    """The source of the pools of one namespace (None: of all namespaces). Pools are up to date while ``run`` runs.

    For an invalid object, the router keeps the last valid version. A failed request to the API server removes no pool.
    ``reservations_in`` is the namespace of the ConfigMap with the reserved model names (None: no reservations). No pool
    is reported before this ConfigMap was read: otherwise, a restarted router might serve a reserved name from another
    namespace.
    """

    def __init__(
        self,
        client: KubeClient,
        namespace: str | None,
        observer: KubePoolsObserver,
        *,
        reservations_in: str | None = None,
        policy: WatchPolicy = WATCH_POLICY,
    ) -> None:
        self._client = client
        self._observer = observer
        self._policy = policy
        self._objects = PoolObjects()
        self._watches: dict[str, _PodWatch] = {}
        self._listed = asyncio.Event()
        self._changed = asyncio.Event()
        self._reported: tuple[Pool, ...] = ()
        self._reported_foreign: list[frozenset[str]] = []
        self._invalid: tuple[InvalidPool, ...] = ()
        self._scope = "all namespaces" if namespace is None else f"namespace {namespace}"
        within = "" if namespace is None else f"/namespaces/{namespace}"
        self._reflector: Reflector[Mapping[str, Any]] = Reflector(
            Collection(client, f"/apis/{API_VERSION}{within}/{POOLS}"),
            _PoolStore(self._objects, self._pools_changed, listed=lambda: observer.kube_listed(POOLS)),
            kind=POOLS,
            # The items of a list lack apiVersion and kind.
            read=lambda body: {"apiVersion": API_VERSION, "kind": "InferencePool", **body},
            policy=policy,
            clock=asyncio.get_running_loop().time,
            on_failure=lambda error: self._failed(POOLS, error),
        )
        self._reservations_read = asyncio.Event()
        self._reservations: Reflector[Mapping[str, str]] | None = None
        if reservations_in is None:
            self._reservations_read.set()
        else:
            self._reservations = Reflector(
                Collection(client, f"/api/v1/namespaces/{reservations_in}/{CONFIG_MAPS}", name=CONFIG_MAP),
                _ReservationStore(self._reserve, listed=lambda: observer.kube_listed(CONFIG_MAPS)),
                kind=CONFIG_MAPS,
                read=lambda body: read_reservations(mapping_in(body, "data")),
                policy=policy,
                clock=asyncio.get_running_loop().time,
                on_failure=lambda error: self._failed(CONFIG_MAPS, error),
            )

    async def listed(self) -> None:
        """Wait until all pools are listed and reported for the first time."""
        await self._listed.wait()

    def ages_s(self) -> dict[str, float]:
        """Return for each resource the seconds since the API server's last answer, from its most stale watch.

        Any thread may call this method.
        """
        pods = [watch.reflector.age_s for watch in tuple(self._watches.values())]
        ages = {POOLS: self._reflector.age_s}
        if self._reservations is not None:
            ages[CONFIG_MAPS] = self._reservations.age_s
        return {**ages, PODS: max(pods)} if pods else ages

    async def run(self, on_pools: Callable[[tuple[Pool, ...]], None]) -> None:
        """Watch until cancelled; call ``on_pools`` with all pools after the first list and after every change."""
        _log.info("Listing pools from the Kubernetes API", server=self._client.server, scope=self._scope)
        async with asyncio.TaskGroup() as self._tasks:
            self._tasks.create_task(self._reflector.run())
            if self._reservations is not None:
                self._tasks.create_task(self._reservations.run())
            self._tasks.create_task(self._report(on_pools))

    async def _report(self, on_pools: Callable[[tuple[Pool, ...]], None]) -> None:
        await self._reservations_read.wait()
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                self._report_once(on_pools)
            except Exception as error:  # noqa: BLE001  # an unexpected error must not end the reports of all pools
                _log.error("Applying a pool change failed, keeping the last valid pools", reason=repr(error))
            self._listed.set()

    def _report_once(self, on_pools: Callable[[tuple[Pool, ...]], None]) -> None:
        pools = tuple(self._as_their_pods(pool) for pool in self._objects.pools)
        foreign = [pool.foreign_names for pool in pools]
        if (pools, foreign) == (self._reported, self._reported_foreign) and self._listed.is_set():
            return
        log_changes(self._reported, pools)
        self._reported, self._reported_foreign = pools, foreign
        on_pools(pools)

    def _as_their_pods(self, pool: Pool) -> Pool:
        watch = self._watches.get(pool.id)
        if watch is None:
            return pool
        applied = watch.pods.applied(pool)
        left_out = [was.id for was, now in zip(pool.members, applied.members, strict=True) if was.state != now.state]
        if left_out != watch.left_out:
            watch.left_out = left_out
            _log.info("Excluding members with unready pods", pool=pool.id, members=clipped(left_out))
        return applied

    def _pools_changed(self) -> None:
        """Apply the current state of the objects: start and stop watches of pods, and report invalid pools."""
        wanted = self._objects.selectors
        for pool_id, watch in tuple(self._watches.items()):
            if wanted.get(pool_id) != watch.selector:
                watch.task.cancel()
                del self._watches[pool_id]
        for pool in self._objects.pools:
            if pool.id in wanted and pool.id not in self._watches:
                self._watches[pool.id] = self._watch_pods(pool.namespace, wanted[pool.id])
            if pool.id in self._watches:
                self._watches[pool.id].pods.published(pool)
        self._report_invalid()
        self._changed.set()

    def _reserve(self, reserved: Mapping[str, str]) -> None:
        """Apply the reserved model names."""
        self._objects.reserve(reserved)
        self._reservations_read.set()
        self._report_invalid()
        if self._listed.is_set():
            self._changed.set()

    def _watch_pods(self, namespace: str, selector: str) -> _PodWatch:
        pods = PoolPods()
        reflector: Reflector[PodFacts] = Reflector(
            Collection(self._client, f"/api/v1/namespaces/{namespace}/{PODS}", selector=selector),
            _PodStore(pods, self._changed.set, listed=lambda: self._observer.kube_listed(PODS)),
            kind=PODS,
            read=pod_facts,
            policy=self._policy,
            clock=asyncio.get_running_loop().time,
            on_failure=lambda error: self._failed(PODS, error),
        )
        task = self._tasks.create_task(reflector.run())
        return _PodWatch(selector=selector, pods=pods, reflector=reflector, task=task)

    def _failed(self, resource: str, error: KubeError) -> None:
        kind = "expired" if error.expired else "refused" if error.status else "unreached"
        self._observer.kube_failed(resource, kind)

    def _report_invalid(self) -> None:
        """Log and count pools that have become invalid, and log pools that are valid again."""
        if not self._reservations_read.is_set():
            return
        invalid = self._objects.invalid
        for invalid_pool in invalid:
            if invalid_pool not in self._invalid:
                _log.error(
                    "Rejected pool, keeping the last valid version",
                    pool=invalid_pool.pool,
                    field=invalid_pool.field,
                    value=invalid_pool.value,
                    accepted=invalid_pool.accepted,
                )
                self._observer.pools_refused()
        refused = {invalid_pool.pool for invalid_pool in invalid}
        for pool in sorted({invalid_pool.pool for invalid_pool in self._invalid} - refused):
            _log.info("Pool is valid again", pool=pool)
        self._invalid = invalid
        self._observer.kube_pools_refused(len(refused))


class _PoolStore:
    """The receiver of InferencePool objects (``dualmap_edge.kube.watch.Store``)."""

    def __init__(self, objects: PoolObjects, changed: Callable[[], None], *, listed: Callable[[], None]) -> None:
        self._objects = objects
        self._changed = changed
        self._listed = listed

    def replace(self, objects: Sequence[Mapping[str, Any]]) -> None:
        self._listed()
        self._objects.replace(objects)
        self._changed()

    def put(self, item: Mapping[str, Any]) -> None:
        self._objects.put(item)
        self._changed()

    def remove(self, item: Mapping[str, Any]) -> None:
        self._objects.remove(item)
        self._changed()


class _ReservationStore:
    """The receiver of the reserved model names (``dualmap_edge.kube.watch.Store``): the content of one ConfigMap."""

    def __init__(self, reserve: Callable[[Mapping[str, str]], None], *, listed: Callable[[], None]) -> None:
        self._reserve = reserve
        self._listed = listed

    def replace(self, objects: Sequence[Mapping[str, str]]) -> None:
        self._listed()
        self._reserve(objects[0] if objects else {})

    def put(self, item: Mapping[str, str]) -> None:
        self._reserve(item)

    def remove(self, item: Mapping[str, str]) -> None:
        self._reserve({})


class _PodStore:
    """The receiver of the pods of one pool (``dualmap_edge.kube.watch.Store``)."""

    def __init__(self, pods: PoolPods, changed: Callable[[], None], *, listed: Callable[[], None]) -> None:
        self._pods = pods
        self._changed = changed
        self._listed = listed

    def replace(self, objects: Sequence[PodFacts]) -> None:
        self._listed()
        self._pods.listed(objects)
        self._changed()

    def put(self, item: PodFacts) -> None:
        self._pods.seen(item)
        self._changed()

    def remove(self, item: PodFacts) -> None:
        self._pods.gone(item.name)
        self._changed()
