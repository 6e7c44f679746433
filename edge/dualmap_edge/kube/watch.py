"""Updates a copy of a collection of Kubernetes objects: list once, then watch, and list again if necessary.

The operator's ``observe.mirror`` and the router's ``pools.kube`` each run a ``Reflector`` (the name of this loop in
client-go). Operator and router recover differently from errors, so ``WatchPolicy`` is an argument. While the API server
is unreachable, the store keeps its objects. If a connection breaks without a signal, the watch ends at its inactivity
limit. ``age_s`` is the age of the copy.
"""

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final, Generic, NoReturn, Protocol, TypeVar

from dualmap_edge.kube.client import (
    WATCH_INACTIVITY_S,
    WATCH_TIMEOUT_S,
    KubeClient,
    KubeError,
    Page,
    WatchEvent,
    pages,
)
from dualmap_edge.logs import get_logger

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)

_ABSENT: Final = (403, 404)
# After a watch shorter than this time, the loop pauses: a proxy may end every watch at once.
_SHORT_WATCH_S: Final = 1.0
# 2^30 first pauses are longer than any limit; larger exponents would overflow.
_MOST_DOUBLINGS: Final = 30
_log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchPolicy:
    """The settings for a reflector's recovery from errors.

    If ``resume`` is true, a reflector watches again from the last received version after a broken connection;
    otherwise, it lists again. The server ends a watch after ``timeout_s``. A watch without data for ``inactivity_s`` is
    broken. Pauses after failures double from ``first_pause_s`` to ``longest_pause_s``. ``jitter`` is the random share
    of a pause, so that many clients do not reconnect at the same time.
    """

    resume: bool = False
    timeout_s: float = WATCH_TIMEOUT_S
    inactivity_s: float = WATCH_INACTIVITY_S
    first_pause_s: float = 0.5
    longest_pause_s: float = 10.0
    jitter: float = 0.0

    def pause_s(self, failures: int) -> float:
        """Return the pause after ``failures`` consecutive failures."""
        full_s = min(self.longest_pause_s, self.first_pause_s * 2.0 ** min(failures - 1, _MOST_DOUBLINGS))
        return full_s * random.uniform(1.0 - self.jitter, 1.0)


class ListerWatcher(Protocol):
    """Lists and watches one collection. Both methods raise KubeError for any failure."""

    def pages(self) -> AsyncGenerator[Page, None]:
        """Yield the complete collection, page by page."""

    def watch(self, version: str, *, timeout_s: float, inactivity_s: float) -> AsyncGenerator[WatchEvent, None]:
        """Yield the events after ``version``; return when the server ends the watch normally."""


class Store(Protocol[T_contra]):
    """A store for the objects, with methods that must not raise."""

    def replace(self, objects: Sequence[T_contra]) -> None:
        """Replace the content with the result of a list: all objects that exist now."""

    def put(self, item: T_contra) -> None:
        """Store an object that was added or modified."""

    def remove(self, item: T_contra) -> None:
        """Remove a deleted object; ``item`` is its last state."""


class Collection:
    """The objects at ``path`` with ``name`` that ``selector`` matches (empty: all), read through a ``KubeClient``."""

    def __init__(self, client: KubeClient, path: str, *, selector: str = "", name: str = "") -> None:
        self._client = client
        self._path = path
        self._query = [("labelSelector", selector)] if selector else []
        if name:
            # RBAC permits a list or watch of one named object only with this selector.
            self._query.append(("fieldSelector", f"metadata.name={name}"))

    def pages(self) -> AsyncGenerator[Page, None]:
        """Yield the complete collection, page by page."""
        return pages(self._client, self._path, query=self._query)

    def watch(self, version: str, *, timeout_s: float, inactivity_s: float) -> AsyncGenerator[WatchEvent, None]:
        """Yield the events after ``version``."""
        query = [*self._query, ("resourceVersion", version)]
        return self._client.watch(self._path, query=query, timeout_s=timeout_s, inactivity_s=inactivity_s)


class Reflector(Generic[T]):
    """Copies a collection into ``store``; ``read`` converts each object into its stored value.

    ``kind`` is the collection's name in logs. ``clock`` is monotonic, in seconds. Every failure calls ``on_failure``;
    an exception from ``on_failure`` ends ``run``. With ``optional``, the collection counts as empty while the server
    does not serve its kind (404), or does not permit to list it (403).
    """

    def __init__(
        self,
        source: ListerWatcher,
        store: Store[T],
        *,
        kind: str,
        read: Callable[[Mapping[str, Any]], T],
        policy: WatchPolicy,
        clock: Callable[[], float],
        on_failure: Callable[[KubeError], None] = lambda _: None,
        optional: bool = False,
    ) -> None:
        self._optional = optional
        self._source = source
        self._store = store
        self._kind = kind
        self._read = read
        self._policy = policy
        self._clock = clock
        self._on_failure = on_failure
        self._version = ""
        self._heard_s = clock()
        self._failures = 0
        self._watch_failed = False
        self._logged = ""

    @property
    def age_s(self) -> float:
        """Seconds since the server's last list, event, bookmark or regular end of a watch.

        Without changes, the age grows up to the length of a watch. Any thread may read this property.
        """
        return self._clock() - self._heard_s

    async def run(self) -> NoReturn:
        """List and watch until cancelled; retry after every failure."""
        while True:
            try:
                await self._list()
                await self._follow()
            except KubeError as error:
                # Objects that can be listed but not watched stay: they would otherwise come and go with each list.
                if self._optional and error.status in _ABSENT and not self._watch_failed:
                    await self._wait_for_kind(error)
                else:
                    await self._pause(error)

    async def _wait_for_kind(self, error: KubeError) -> None:
        """Take that the collection is empty, and sleep."""
        self._heard_s = self._clock()
        self._store.replace(())
        if str(error) != self._logged:
            self._logged = str(error)
            _log.info("Continuing without an optional Kubernetes kind", kind=self._kind, reason=str(error))
        await asyncio.sleep(self._policy.pause_s(_MOST_DOUBLINGS))

    async def _list(self) -> None:
        """Replace the store's content with the present collection."""
        self._watch_failed, before = False, self._watch_failed
        objects: list[T] = []
        async for page in self._source.pages():
            # Convert page by page: the complete objects of all pods of a cluster may be hundreds of megabytes.
            objects += [self._read(body) for body in page.objects]
            self._version = page.version
        self._store.replace(objects)
        # While watches fail, a successful list does not reset the backoff.
        self._heard(recovered=not before)

    async def _follow(self) -> NoReturn:
        """Watch repeatedly from the present version on; raise KubeError if a list is necessary."""
        while True:
            began_s = self._clock()
            try:
                await self._watch()
            except KubeError as error:
                self._watch_failed = True
                if error.status or not self._policy.resume:
                    raise
                await self._pause(error)
                continue
            if self._clock() - began_s < _SHORT_WATCH_S:
                await asyncio.sleep(self._policy.pause_s(1))

    async def _watch(self) -> None:
        """Pass the events of one watch to the store until the server ends it."""
        policy = self._policy
        watch = self._source.watch(self._version, timeout_s=policy.timeout_s, inactivity_s=policy.inactivity_s)
        async with aclosing(watch) as events:
            async for event in events:
                self._heard(recovered=True)
                self._version = event.version or self._version
                if event.type in ("ADDED", "MODIFIED"):
                    self._store.put(self._read(event.object))
                elif event.type == "DELETED":
                    self._store.remove(self._read(event.object))
        self._heard(recovered=True)

    def _heard(self, *, recovered: bool) -> None:
        self._heard_s = self._clock()
        if not recovered:
            return
        self._failures, self._watch_failed = 0, False
        if self._logged:
            self._logged = ""
            _log.info("Kubernetes watch recovered", kind=self._kind)

    async def _pause(self, error: KubeError) -> None:
        """Report a failure and sleep: longer after each consecutive failure, at least the server's Retry-After."""
        self._failures += 1
        self._on_failure(error)
        # Expired versions are normal; the next list recovers. Repeated failures are logged once.
        if not error.expired and str(error) != self._logged:
            self._logged = str(error)
            _log.warning(
                "Kubernetes list or watch failed, keeping known objects",
                kind=self._kind,
                error=str(error),
                age_s=round(self.age_s, 1),
            )
        await asyncio.sleep(max(self._policy.pause_s(self._failures), error.retry_after_s or 0.0))
