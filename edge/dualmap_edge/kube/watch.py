"""Keeps a copy of a collection of Kubernetes objects up to date: list once, then watch, and list again where needed.

The operator's ``observe.mirror`` and the router's ``pools.kube`` each run a ``Reflector`` (client-go's name for this
loop). How they recover differs, so ``WatchPolicy`` is an argument. While the API server is away, the store keeps what
it has. A watch whose connection was cut without notice ends by its inactivity limit, and ``age_s`` shows how old the
copy is.
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

# A proxy may end every watch at once: after a watch shorter than this, the loop pauses.
_SHORT_WATCH_S: Final = 1.0
# 2^30 pauses are longer than any limit; larger exponents only overflow.
_MOST_DOUBLINGS: Final = 30
_log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchPolicy:
    """How a reflector recovers.

    ``resume``: after a broken connection, watch again from the last version seen; otherwise list again.
    ``timeout_s``: after this time the server ends a watch. ``inactivity_s``: a watch silent for longer is broken.
    Pauses after failures double from ``first_pause_s`` to ``longest_pause_s``; ``jitter`` is the share of a pause that
    is random, so that many clients do not return at once.
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
        """Yield the whole collection, page by page."""

    def watch(self, version: str, *, timeout_s: float, inactivity_s: float) -> AsyncGenerator[WatchEvent, None]:
        """Yield the events after ``version``; return when the server ends the watch in order."""


class Store(Protocol[T_contra]):
    """Receives the objects. Its methods must not raise."""

    def replace(self, objects: Sequence[T_contra]) -> None:
        """Take the result of a list: everything that exists now."""

    def put(self, item: T_contra) -> None:
        """Take an object that was added or modified."""

    def remove(self, item: T_contra) -> None:
        """Take an object that was deleted, as it was at last."""


class Collection:
    """The objects at ``path`` that ``selector`` matches (empty: all), by way of a ``KubeClient``."""

    def __init__(self, client: KubeClient, path: str, *, selector: str = "") -> None:
        self._client = client
        self._path = path
        self._query = [("labelSelector", selector)] if selector else []

    def pages(self) -> AsyncGenerator[Page, None]:
        """Yield the whole collection, page by page."""
        return pages(self._client, self._path, query=self._query)

    def watch(self, version: str, *, timeout_s: float, inactivity_s: float) -> AsyncGenerator[WatchEvent, None]:
        """Yield the events after ``version``."""
        query = [*self._query, ("resourceVersion", version)]
        return self._client.watch(self._path, query=query, timeout_s=timeout_s, inactivity_s=inactivity_s)


class Reflector(Generic[T]):
    """Copies a collection into ``store``; ``read`` makes the stored value of an object, page by page.

    ``kind`` names the collection in logs. ``clock`` is monotonic, in seconds. ``on_failure`` is called with every
    failure; an exception that it raises ends ``run``.
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
    ) -> None:
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
        """Seconds since the server last answered: a list, an event, a bookmark, or the regular end of a watch.

        At rest it grows up to the length of a watch. Safe to read in any thread.
        """
        return self._clock() - self._heard_s

    async def run(self) -> NoReturn:
        """List and watch until cancelled; retry after every failure."""
        while True:
            try:
                await self._list()
                await self._follow()
            except KubeError as error:
                await self._pause(error)

    async def _list(self) -> None:
        """Replace the store's content by the collection as it is now."""
        self._watch_failed, before = False, self._watch_failed
        objects: list[T] = []
        async for page in self._source.pages():
            # Read page by page: the bodies of a whole cluster's pods may be hundreds of megabytes.
            objects += [self._read(body) for body in page.objects]
            self._version = page.version
        self._store.replace(objects)
        # While watches fail, a successful list does not reset the backoff.
        self._heard(recovered=not before)

    async def _follow(self) -> NoReturn:
        """Watch from the present version on, again and again; raises KubeError when a list is needed."""
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
        """Report a failure and sleep: longer after each in a row, and at least as long as the server asks."""
        self._failures += 1
        self._on_failure(error)
        # Versions expire in normal operation; the next list recovers. Repeated failures are logged once.
        if not error.expired and str(error) != self._logged:
            self._logged = str(error)
            _log.warning(
                "Kubernetes list or watch failed, keeping known objects",
                kind=self._kind,
                error=str(error),
                age_s=round(self.age_s, 1),
            )
        await asyncio.sleep(max(self._policy.pause_s(self._failures), error.retry_after_s or 0.0))
