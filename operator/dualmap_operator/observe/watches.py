"""Mirrors of pools, pods and children. A changed object triggers a reconcile of each pool that it affects.

``gather`` reads the mirrors. A mirror keeps only the required fields of a pod and a hash of a child. The complete
objects of a thousand pods would need megabytes.
"""

import hashlib
import json
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from dualmap.objects.pods import mapping_in, mappings_in, text_in
from dualmap.objects.pool_reader import API_VERSION
from dualmap.objects.reservations import CONFIG_MAP, read_reservations
from dualmap.pools.claims import LostClaim
from dualmap_edge.kube.client import KubeClient
from dualmap_operator.api import ApiObserver, collection_path
from dualmap_operator.decide.observed import ObservedPod, ObservedStatefulSet, PoolStatus
from dualmap_operator.decide.pod_reading import matches, read_pod, read_statefulset, read_status
from dualmap_operator.decide.spec import PoolSpec, SelectorWorkload
from dualmap_operator.names import FIELD_MANAGER, POOL_LABEL
from dualmap_operator.observe.claims import Claims
from dualmap_operator.observe.mirror import Key, Mirror

FLAP_WINDOW_S: Final = 300.0
"""The time for which a loss of readiness counts."""
_CHILDREN: Final = (("apps/v1", "StatefulSet"), ("v1", "Service"), ("policy/v1", "PodDisruptionBudget"))
_IGNORED_METADATA: Final = ("resourceVersion", "generation", "managedFields")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolObject:
    """One InferencePool: its ``document`` without managedFields, and its parsed status."""

    document: Mapping[str, Any]
    uid: str
    resource_version: str
    status: PoolStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class PodObject:
    """One pod with its labels. ``pool`` is the name of the pool that created the pod, or empty."""

    labels: Mapping[str, Any]
    pool: str
    pod: ObservedPod


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildObject:
    """One object of a child's kind: the pool in its label, and a hash of every field that a client may set.

    ``controller`` is the uid of the object's controller, or empty. ``ours`` is true if the operator has applied the
    object.
    """

    pool: str
    fingerprint: str
    controller: str = ""
    ours: bool = False
    statefulset: ObservedStatefulSet | None = None

    def belongs_to(self, uid: str) -> bool:
        """Return whether this object belongs to the pool with ``uid``.

        The pool is the object's controller, or the object has no controller and the operator has applied it.
        """
        return self.controller == uid or (self.ours and not self.controller)


class Watches:
    """Mirrors of pools, pods and children in ``namespace`` (None: all namespaces).

    ``reservations_in`` is the namespace of the ConfigMap with the reserved model names (None: no reservations).
    ``wake`` queues a pool's reconcile. ``clock`` is monotonic, in seconds.
    """

    def __init__(
        self,
        client: KubeClient,
        observer: ApiObserver,
        *,
        namespace: str | None,
        reservations_in: str | None = None,
        wake: Callable[[Key], None],
        clock: Callable[[], float],
    ) -> None:
        self._wake = wake
        self._clock = clock
        self._claims = Claims()
        self._selectors: dict[Key, Mapping[str, Any]] = {}
        self._pods_in: defaultdict[str, dict[Key, PodObject]] = defaultdict(dict)
        self._flaps: dict[str, deque[float]] = {}
        self._versions: dict[str, int] = {}

        def path(api_version: str, kind: str) -> str:
            return collection_path(api_version, kind, namespace)

        self.pools = Mirror(
            client,
            observer,
            kind="InferencePool",
            path=path(API_VERSION, "InferencePool"),
            read=read_pool,
            listener=self._pool_changed,
            clock=clock,
        )
        self.pods = Mirror(
            client,
            observer,
            kind="Pod",
            path=path("v1", "Pod"),
            read=read_pod_object,
            listener=self._pod_changed,
            clock=clock,
        )
        self._children = {
            kind: Mirror(
                client,
                observer,
                kind=kind,
                path=path(api_version, kind),
                read=read_child,
                listener=self._child_changed,
                clock=clock,
                selector=POOL_LABEL,
            )
            for api_version, kind in _CHILDREN
        }
        self._reservations = (
            None
            if reservations_in is None
            else Mirror(
                client,
                observer,
                kind="ConfigMap",
                path=collection_path("v1", "ConfigMap", reservations_in),
                read=lambda body: read_reservations(mapping_in(body, "data")),
                listener=self._reservations_changed,
                clock=clock,
                name=CONFIG_MAP,
            )
        )

    def pods_of(self, spec: PoolSpec) -> tuple[ObservedPod, ...]:
        """Return a pool's pods: the pods that its StatefulSet controls, or the pods that its selector matches."""
        here = self._pods_in.get(spec.namespace, {})
        if isinstance(spec.workload, SelectorWorkload):
            selector = spec.workload.selector
            mine = [each for each in here.values() if matches(selector, each.labels)]
        else:
            mine = [each for each in here.values() if each.pool == spec.name]
        return self._seen(mine)

    def pods_left(self, key: Key, members: Collection[str]) -> tuple[ObservedPod, ...]:
        """Return a pool's pods without its spec: the pods of its StatefulSet and the pods of the ring's members."""
        here = self._pods_in.get(key[0], {})
        return self._seen(each for each in here.values() if each.pool == key[1] or each.pod.name in members)

    def highest_version(self, uid: str) -> int:
        """Return the highest published ring version of the pool with ``uid``; 0 if none is known."""
        return self._versions.get(uid, 0)

    def lost_claims(self, key: Key) -> tuple[LostClaim, ...]:
        """Return the model names that a pool claims but that belong to an older pool or to another namespace."""
        return self._claims.lost(key)

    def prefill_problem(self, key: Key) -> str:
        """Return why a pool's prefill pool cannot prefill for it; empty if it can, or if the pool names none."""
        return self._claims.prefill_problem(key)

    def unreserved(self, key: Key) -> tuple[str, ...]:
        """Return the model names of a pool that must be reserved when the pool serves them."""
        return () if self._reservations is None else self._claims.unreserved(key)

    def child(self, kind: str, key: Key) -> ChildObject | None:
        """Return a child from the watch; None if it does not exist."""
        return self._children[kind].get(key)

    def statefulset(self, key: Key, uid: str) -> ObservedStatefulSet | None:
        """Return the StatefulSet of the pool with this name and uid from the watch; None if it does not exist."""
        child = self.child("StatefulSet", key)
        return child.statefulset if child is not None and child.belongs_to(uid) else None

    @property
    def mirrors(self) -> tuple[Mirror[Any], ...]:
        """The mirrors of all kinds; ``control`` runs them."""
        reservations = () if self._reservations is None else (self._reservations,)
        return (self.pools, self.pods, *self._children.values(), *reservations)

    def _seen(self, pods: Iterable[PodObject]) -> tuple[ObservedPod, ...]:
        return tuple(replace(each.pod, flaps=self._flaps_of(each.pod.uid)) for each in pods)

    def _pool_changed(self, key: Key, before: PoolObject | None, after: PoolObject | None) -> None:
        if before is not None and (after is None or after.uid != before.uid):
            self._versions.pop(before.uid, None)
        if after is not None:
            # After a manual edit of the status, only this operator and the routers have the last published version.
            self._versions[after.uid] = max(self.highest_version(after.uid), after.status.ring_version)
        workload = {} if after is None else mapping_in(mapping_in(after.document, "spec"), "workload")
        self._selectors.pop(key, None)
        if "selector" in workload:
            self._selectors[key] = mapping_in(workload, "selector")
        documents = (None if each is None else each.document for each in (before, after))
        for rival in self._claims.changed(key, *documents):
            self._wake(rival)
        self._wake(key)

    def _reservations_changed(self, _: Key, before: Mapping[str, str] | None, after: Mapping[str, str] | None) -> None:
        for key in self._claims.reserve(after or {}):
            self._wake(key)

    def _pod_changed(self, key: Key, before: PodObject | None, after: PodObject | None) -> None:
        if after is None:
            self._pods_in[key[0]].pop(key, None)
        else:
            self._pods_in[key[0]][key] = after
        if before is not None:
            self._note_flap(before.pod, None if after is None else after.pod)
        woken: set[Key] = set()
        for each in (before, after):
            if each is not None:
                woken.update(self._pools_of(key[0], each))
        for pool in woken:
            self._wake(pool)

    def _child_changed(self, key: Key, before: ChildObject | None, after: ChildObject | None) -> None:
        for pool in {each.pool for each in (before, after) if each is not None}:
            self._wake((key[0], pool))

    def _pools_of(self, namespace: str, pod: PodObject) -> list[Key]:
        owner = [(namespace, pod.pool)] if pod.pool else []
        adopting = [
            key for key, selector in self._selectors.items() if key[0] == namespace and matches(selector, pod.labels)
        ]
        return owner + adopting

    def _note_flap(self, before: ObservedPod, after: ObservedPod | None) -> None:
        if after is None or after.uid != before.uid:
            self._flaps.pop(before.uid, None)
        elif before.serving and not after.serving and not after.terminating:
            self._flaps.setdefault(before.uid, deque()).append(self._clock())

    def _flaps_of(self, uid: str) -> int:
        times = self._flaps.get(uid)
        if times is None:
            return 0
        oldest_s = self._clock() - FLAP_WINDOW_S
        while times and times[0] < oldest_s:
            times.popleft()
        return len(times)


def read_pool(body: Mapping[str, Any]) -> PoolObject:
    """Read an InferencePool for the mirror."""
    metadata = mapping_in(body, "metadata")
    kept = {key: value for key, value in metadata.items() if key != "managedFields"}
    return PoolObject(
        # Set kind and apiVersion, which the items of a list do not have.
        document={**body, "apiVersion": API_VERSION, "kind": "InferencePool", "metadata": kept},
        uid=text_in(metadata, "uid"),
        resource_version=text_in(metadata, "resourceVersion"),
        status=read_status(body.get("status")),
    )


def read_pod_object(body: Mapping[str, Any]) -> PodObject:
    """Read a pod for the mirror."""
    metadata = mapping_in(body, "metadata")
    pod = read_pod(body)
    return PodObject(labels=mapping_in(metadata, "labels"), pool=_pool_of(metadata, pod), pod=pod)


def _pool_of(metadata: Mapping[str, Any], pod: ObservedPod) -> str:
    """Return the pool in a pod's label if the pool's StatefulSet controls the pod or will adopt it again."""
    pool, controller = text_in(mapping_in(metadata, "labels"), POOL_LABEL), _controller(metadata)
    if controller is not None:
        mine = controller.get("kind") == "StatefulSet" and controller.get("name") == pool
    else:
        mine = pod.ordinal is not None and pod.name == f"{pool}-{pod.ordinal}"
    return pool if mine else ""


def _controller(metadata: Mapping[str, Any]) -> Mapping[str, Any] | None:
    return next((each for each in mappings_in(metadata, "ownerReferences") if each.get("controller") is True), None)


def read_child(body: Mapping[str, Any]) -> ChildObject:
    """Read a StatefulSet, Service or PodDisruptionBudget for the mirror."""
    metadata = mapping_in(body, "metadata")
    managers = [each.get("manager") for each in mappings_in(metadata, "managedFields")]
    return ChildObject(
        pool=text_in(mapping_in(metadata, "labels"), POOL_LABEL),
        fingerprint=fingerprint(body),
        controller=text_in(_controller(metadata) or {}, "uid"),
        ours=FIELD_MANAGER in managers,
        statefulset=read_statefulset(body) if "podManagementPolicy" in mapping_in(body, "spec") else None,
    )


def fingerprint(body: Mapping[str, Any]) -> str:
    """Return a hash of every field that a client may set, without the status and fields that the API server sets."""
    content = {key: value for key, value in body.items() if key not in ("apiVersion", "kind", "status", "metadata")}
    metadata = mapping_in(body, "metadata")
    content["metadata"] = {key: value for key, value in metadata.items() if key not in _IGNORED_METADATA}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
