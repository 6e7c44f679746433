"""A copy of all objects of one kind. A ``Reflector`` updates the copy, and a listener is called for every change.

``watches`` creates one mirror for each kind that the operator reads. If an object is deleted while no watch is open,
the next list removes the object and calls the listener. The index of kopf (1.45.2) keeps such an object, because that
index removes objects on DELETED events only. With that index, a deleted pod would stay in the ring.

A broken watch resumes from the last received resource version: no event is lost, and a list of all pods of a cluster is
expensive. The router (``pools.kube``) lists its few pods again instead, so that its copy is current as soon as the API
server is reachable.

The mirror contains objects from lists and watches only. Responses to the operator's own writes are ignored, because a
response may arrive after the object's deletion.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Generic, TypeVar

from dualmap_edge.kube.client import KubeClient, KubeError, Page, WatchEvent
from dualmap_edge.kube.watch import Collection, ListerWatcher, Reflector, WatchPolicy
from dualmap_operator.api import ApiObserver

T = TypeVar("T")
Key = tuple[str, str]
"""The namespace and name of an object."""
Listener = Callable[[Key, T | None, T | None], None]
"""Called for each change with the object's key, old value and new value; None if the object does not exist."""

WATCH_POLICY: Final = WatchPolicy(resume=True, first_pause_s=0.5, longest_pause_s=5.0)


class Mirror(Generic[T]):
    """All objects at ``path`` with ``name`` that ``selector`` matches (empty: all).

    Logs, metrics and health checks contain ``kind``.
    """

    def __init__(
        self,
        client: KubeClient,
        observer: ApiObserver,
        *,
        kind: str,
        path: str,
        read: Callable[[Mapping[str, Any]], T],
        listener: Listener[T],
        clock: Callable[[], float],
        selector: str = "",
        name: str = "",
        policy: WatchPolicy = WATCH_POLICY,
    ) -> None:
        self.kind = kind
        self._listener = listener
        self._objects: dict[Key, T] = {}
        self._reflector: Reflector[tuple[Key, T]] = Reflector(
            _Counted(Collection(client, path, selector=selector, name=name), observer),
            self,
            kind=kind,
            read=lambda body: (_key(body), read(body)),
            policy=policy,
            clock=clock,
        )
        self.listed = asyncio.Event()
        """Set once the first list is complete."""

    def get(self, key: Key) -> T | None:
        """Return one object; None if no object has this name."""
        return self._objects.get(key)

    def items(self) -> Iterator[tuple[Key, T]]:
        """Return an iterator over all objects; it is valid until the next await."""
        return iter(self._objects.items())

    @property
    def age_s(self) -> float:
        """Seconds since the last answer of the API server."""
        return self._reflector.age_s

    async def run(self) -> None:
        """Update the copy until the task is cancelled."""
        await self._reflector.run()

    def replace(self, objects: Sequence[tuple[Key, T]]) -> None:
        """Replace the content with the result of a list (``dualmap_edge.kube.watch.Store``)."""
        present = dict(objects)
        for key in [key for key in self._objects if key not in present]:
            self._set(key, None)
        for key, value in present.items():
            self._set(key, value)
        self.listed.set()

    def put(self, item: tuple[Key, T]) -> None:
        """Store an object that was added or modified."""
        self._set(*item)

    def remove(self, item: tuple[Key, T]) -> None:
        """Remove an object that was deleted."""
        self._set(item[0], None)

    def _set(self, key: Key, value: T | None) -> None:
        before = self._objects.get(key)
        if value is None:
            self._objects.pop(key, None)
        else:
            self._objects[key] = value
        if before != value:
            self._listener(key, before, value)


class _Counted:
    """A collection that reports each request to ``observer``."""

    def __init__(self, source: ListerWatcher, observer: ApiObserver) -> None:
        self._source = source
        self._observer = observer

    async def pages(self) -> AsyncGenerator[Page, None]:
        try:
            async for page in self._source.pages():
                self._observer.api_request("LIST", 200)
                yield page
        except KubeError as error:
            self._observer.api_request("LIST", error.status)
            raise

    def watch(self, version: str, *, timeout_s: float, inactivity_s: float) -> AsyncGenerator[WatchEvent, None]:
        self._observer.api_request("WATCH", 200)
        return self._source.watch(version, timeout_s=timeout_s, inactivity_s=inactivity_s)


def _key(body: Mapping[str, Any]) -> Key:
    metadata = body.get("metadata") or {}
    return str(metadata.get("namespace", "")), str(metadata.get("name", ""))
