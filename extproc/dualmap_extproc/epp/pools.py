"""Watches one InferencePool of the Gateway API Inference Extension, and reports it as a pool to serve.

The pool's selector and target ports give the members: the ready pods at each port. An InferencePool of this project
with the same name and namespace gives the settings, where there is one. InferenceObjectives of the Inference Extension
or of llm-d give the priorities. Settings and priorities are optional: without their kinds, or without the permission
to read them, there are none.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Final, Generic, TypeVar

from dualmap.errors import PoolError
from dualmap.objects.gaie import (
    DECODE_ROLES,
    GROUP_VERSIONS,
    OBJECTIVES_GROUP_VERSIONS,
    PREFILL_ROLES,
    GaiePod,
    GaiePool,
    gaie_members,
    gaie_pod,
    read_gaie_pool,
    read_objectives,
)
from dualmap.objects.pods import mapping_in, text_in
from dualmap.objects.pool_reader import API_VERSION, GROUP, PoolSettings, read_settings
from dualmap.pools.pool import Member, Model, Pool
from dualmap_edge.kube.client import KubeClient, KubeError
from dualmap_edge.kube.watch import Collection, Reflector
from dualmap_edge.logs import get_logger
from dualmap_extproc.epp.prefills import ANY_ROLE, RoleUse
from dualmap_extproc.pools.changes import log_changes
from dualmap_extproc.pools.kube import PODS, WATCH_POLICY, KubePoolsObserver

SETTINGS: Final = f"inferencepools.{GROUP}"
OBJECTIVES: Final = "inferenceobjectives"
_T = TypeVar("_T")
_Body = Mapping[str, Any]
_log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRef:
    """The pool to serve: the InferencePool of a ``group``, or ``fixed`` members without such an object."""

    namespace: str
    name: str
    group: str
    fixed: GaiePool | None = None

    @property
    def prefill_name(self) -> str:
        """The name of the pool with the pods that only prefill. No object of Kubernetes can have it."""
        return f"{self.name}_prefill"


class GaiePools:
    """The source of the pool that ``wanted`` names. The pool is up to date while ``run`` runs.

    If ``roles`` has pods for prefills, these are a second pool, the prefill pool of the first one. ``settings`` apply
    where there is no InferencePool of this project. For an invalid object, the last valid version stays. A failed
    request to the API server removes nothing.
    """

    def __init__(
        self,
        client: KubeClient,
        wanted: PoolRef,
        settings: PoolSettings,
        observer: KubePoolsObserver,
        roles: RoleUse = ANY_ROLE,
    ) -> None:
        self._client = client
        self._wanted = wanted
        self._roles = roles
        self._settings = settings
        self._observer = observer
        self._changed = asyncio.Event()
        self._known = asyncio.Event()
        self._pool: GaiePool | None = wanted.fixed
        self._own: PoolSettings | None = None
        self._members: tuple[Member, ...] = ()
        self._prefill_members: tuple[Member, ...] = ()
        self._reported: tuple[Pool, ...] = ()
        self._rejected: dict[str, str] = {}
        # The faults of pods that are logged, by the pod's name.
        self._pod_faults: dict[str, tuple[str, ...]] = {}
        self._pools = f"inferencepools.{wanted.group}"
        version = GROUP_VERSIONS[wanted.group]
        self._objects = self._watched(self._pools, f"/apis/{wanted.group}/{version}", "inferencepools", wanted.name)
        self._owns = self._watched(SETTINGS, f"/apis/{API_VERSION}", "inferencepools", wanted.name, optional=True)
        self._objectives = tuple(
            self._watched(f"{OBJECTIVES}.{group}", f"/apis/{group}/{version}", OBJECTIVES, optional=True)
            for group, version in OBJECTIVES_GROUP_VERSIONS.items()
        )
        self._pods: _Watched[GaiePod] | None = None
        self._pods_task: asyncio.Task[None] | None = None
        self._selector = ""

    async def known(self) -> None:
        """Wait until the pool exists and is reported for the first time."""
        await self._known.wait()

    def ages_s(self) -> Mapping[str, float]:
        """Return for each resource the seconds since the API server's last answer. Any thread may call this method."""
        watched: list[_Watched[Any]] = [self._owns, *self._objectives]
        if self._wanted.fixed is None:
            watched.append(self._objects)
        if (pods := self._pods) is not None:
            watched.append(pods)
        return {each.kind: each.reflector.age_s for each in watched}

    async def run(self, on_pools: Callable[[tuple[Pool, ...]], None]) -> None:
        """Watch until cancelled; call ``on_pools`` when the pool is known, and after every change."""
        shown = f"{self._wanted.namespace}/{self._wanted.name}"
        _log.info("Watching the pool", server=self._client.server, pool=shown, group=self._wanted.group)
        async with asyncio.TaskGroup() as self._tasks:
            if self._wanted.fixed is None:
                self._tasks.create_task(self._objects.reflector.run())
            self._tasks.create_task(self._owns.reflector.run())
            for each in self._objectives:
                self._tasks.create_task(each.reflector.run())
            self._changed.set()
            while True:
                await self._changed.wait()
                self._changed.clear()
                try:
                    self._update(on_pools)
                except Exception as error:  # noqa: BLE001  # an unexpected error must not end the watch
                    _log.error("Applying a pool change failed, keeping the last valid pool", reason=repr(error))

    def _update(self, on_pools: Callable[[tuple[Pool, ...]], None]) -> None:
        """Read all objects, follow the pool's pods, and report the pool if it has changed."""
        self._read_pool()
        self._read_settings()
        self._observer.kube_pools_refused(len(self._rejected.keys() - {"absent"}))
        self._follow_pods()
        self._log_pod_faults()
        pools = self._as_pools()
        if not self._known.is_set():
            awaited = [each for each in (self._owns, *self._objectives, self._pods) if each is None or not each.listed]
            if awaited:
                return
            _log.info("Serving the pool", pool=pools[0].id, members=len(pools[0].members))
        elif pools == self._reported:
            return
        else:
            log_changes(self._reported, pools)
        self._reported = pools
        on_pools(pools)
        self._known.set()

    def _read_pool(self) -> None:
        wanted = self._wanted
        if wanted.fixed is not None or not self._objects.listed:
            return
        body = self._objects.items.get(wanted.name)
        if body is None:
            if self._pool is not None or "absent" not in self._rejected:
                self._rejected["absent"] = ""
                shown = f"{wanted.namespace}/{wanted.name}"
                _log.warning("Waiting for the pool, which does not exist", pool=shown, group=wanted.group)
            self._rejected.pop(self._pools, None)
            self._pool = None
            return
        self._rejected.pop("absent", None)
        self._pool = self._valid(self._pools, read_gaie_pool, body) or self._pool

    def _read_settings(self) -> None:
        body = self._owns.items.get(self._wanted.name)
        if body is None:
            self._rejected.pop(SETTINGS, None)
            self._own = None
        else:
            self._own = self._valid(SETTINGS, read_settings, body) or self._own

    def _valid(self, kind: str, read: Callable[[_Body], _T], body: _Body) -> _T | None:
        """Return what an object says, or None for an invalid object, which is logged and counted once."""
        try:
            value = read(body)
        except PoolError as error:
            if self._rejected.get(kind) != str(error):
                self._rejected[kind] = str(error)
                _log.error("Rejected object, keeping the last valid version", kind=kind, reason=str(error))
                self._observer.pools_refused()
            return None
        self._rejected.pop(kind, None)
        return value

    def _follow_pods(self) -> None:
        """Watch the pods that the pool selects, instead of those that it selected before."""
        selector = "" if self._pool is None else self._pool.selector
        if selector == self._selector:
            return
        self._selector, self._pods = selector, None
        if self._pool is None:
            self._members = self._prefill_members = ()
        if self._pods_task is not None:
            self._pods_task.cancel()
            self._pods_task = None
        if selector:
            collection = Collection(
                self._client, f"/api/v1/namespaces/{self._wanted.namespace}/{PODS}", selector=selector
            )
            self._pods = self._watch(PODS, collection, gaie_pod, lambda pod: pod.facts.name)
            self._pods_task = self._tasks.create_task(self._pods.reflector.run())

    def _log_pod_faults(self) -> None:
        """Log each value of a pod that is ignored, once until it changes."""
        pods = () if self._pods is None else self._pods.items.values()
        before, self._pod_faults = self._pod_faults, {pod.facts.name: pod.faults for pod in pods if pod.faults}
        for name, faults in self._pod_faults.items():
            for fault in faults:
                if fault not in before.get(name, ()):
                    _log.warning("Ignoring an invalid value of a pod", pod=name, reason=fault)

    def _as_pools(self) -> tuple[Pool, ...]:
        """Return the pool to report, and its prefill pool if it has one.

        A pool that was deleted has no members: it may come back, so requests get 503.
        """
        # While the pods of a new selector are not listed, the members stay.
        if self._pool is not None and self._pods is not None and self._pods.listed:
            pods = self._pods.items.values()
            decoding = DECODE_ROLES if self._roles.respected else None
            self._members = gaie_members(self._pool, pods, self._members, decoding)
            if self._roles.prefill_min_tokens is not None:
                self._prefill_members = gaie_members(self._pool, pods, self._prefill_members, PREFILL_ROLES)
        settings = self._own or self._settings
        pool = Pool(
            namespace=self._wanted.namespace,
            name=self._wanted.name,
            model=Model(name=""),
            engine=settings.engine,
            slo=settings.slo,
            routing=settings.routing,
            kv_store=settings.kv_store,
            members=self._members,
            objectives=read_objectives(
                chain.from_iterable(each.items.values() for each in self._objectives), self._wanted.name
            ),
        )
        least = self._roles.prefill_min_tokens
        if least is None:
            return (pool,)
        prefill = replace(pool, name=self._wanted.prefill_name, members=self._prefill_members)
        return replace(pool, prefill_pool=prefill.name, prefill_min_tokens=least), prefill

    def _watched(
        self, kind: str, api: str, resource: str, name: str = "", *, optional: bool = False
    ) -> "_Watched[_Body]":
        collection = Collection(self._client, f"{api}/namespaces/{self._wanted.namespace}/{resource}", name=name)
        return self._watch(kind, collection, lambda body: body, _name_of, optional=optional)

    def _watch(
        self,
        kind: str,
        collection: Collection,
        read: Callable[[_Body], _T],
        name: Callable[[_T], str],
        *,
        optional: bool = False,
    ) -> "_Watched[_T]":
        def changed(*, listed: bool) -> None:
            if listed:
                self._observer.kube_listed(kind)
            self._changed.set()

        return _Watched(kind, collection, read, name, changed, self._failed, optional=optional)

    def _failed(self, kind: str, error: KubeError) -> None:
        self._observer.kube_failed(kind, "expired" if error.expired else "refused" if error.status else "unreached")


class _Watched(Generic[_T]):
    """The objects of one collection by name (``dualmap_edge.kube.watch.Store``), and the reflector that updates it."""

    def __init__(
        self,
        kind: str,
        collection: Collection,
        read: Callable[[_Body], _T],
        name: Callable[[_T], str],
        changed: Callable[..., None],
        failed: Callable[[str, KubeError], None],
        *,
        optional: bool,
    ) -> None:
        self.kind = kind
        self.items: dict[str, _T] = {}
        self.listed = False
        self._name = name
        self._changed = changed
        self.reflector: Reflector[_T] = Reflector(
            collection,
            self,
            kind=kind,
            read=read,
            policy=WATCH_POLICY,
            clock=asyncio.get_running_loop().time,
            on_failure=lambda error: failed(kind, error),
            optional=optional,
        )

    def replace(self, objects: Sequence[_T]) -> None:
        """Replace all objects."""
        self.items = {self._name(each): each for each in objects}
        self.listed = True
        self._changed(listed=True)

    def put(self, item: _T) -> None:
        """Store an object."""
        self.items[self._name(item)] = item
        self._changed(listed=False)

    def remove(self, item: _T) -> None:
        """Remove a deleted object."""
        self.items.pop(self._name(item), None)
        self._changed(listed=False)


def _name_of(body: _Body) -> str:
    return text_in(mapping_in(body, "metadata"), "name")
