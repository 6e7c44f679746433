"""A mirror of all objects of one kind: listed, then watched, listed again whenever the watch has lost its place.

``watches`` holds one for each kind that the operator reads. An object that vanished while nobody was watching is gone
after the next list, and whoever listens is told so: kopf's own index (1.45.2) keeps such objects for good, since it
forgets only what a DELETED event names, and a pod that is no more would stay in the ring.

A watch that broke off goes on where it was: nothing is lost, and a list of a whole cluster's pods is dear. The router
(``pools.reflector``) lists its few pods again instead, since how old its news shows as is to fall as soon as the server
is back, and it waits at random, since there are many routers.

What is kept of an object is what ``read`` makes of it. Nothing that a write of ours answered enters here: an answer may
come after the object's end.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import aclosing
from typing import Any, Final, Generic, TypeVar

from dualmap_edge.kube.client import KubeClient, KubeError, pages
from dualmap_edge.logs import get_logger
from dualmap_operator.api import ApiObserver

T = TypeVar("T")
Key = tuple[str, str]
"""Namespace and name."""
Listener = Callable[[Key, T | None, T | None], None]
"""Told of each change: the object's key, what it was and what it is; None for not there."""

_FIRST_WAIT_S: Final = 0.5
_LONGEST_WAIT_S: Final = 5.0
# A watch that ended sooner is not begun again at once.
_SHORT_S: Final = 1.0


class Mirror(Generic[T]):
    """All objects at ``path`` that ``selector`` selects. ``kind`` names them in logs, metrics and health."""

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
    ) -> None:
        self.kind = kind
        self._client = client
        self._observer = observer
        self._path = path
        self._query = (("labelSelector", selector),) if selector else ()
        self._read = read
        self._listener = listener
        self._clock = clock
        self._log = get_logger(__name__)
        self._objects: dict[Key, T] = {}
        self._version = ""
        self._spoke_at_s = clock()
        self._wait_s, self._said = _FIRST_WAIT_S, ""
        self.listed = asyncio.Event()
        """Set once the first list is complete."""

    def get(self, key: Key) -> T | None:
        """Return one object, None if there is none of that name."""
        return self._objects.get(key)

    def items(self) -> Iterator[tuple[Key, T]]:
        """Return an iterator over all objects; it must be used up before anything else is awaited."""
        return iter(self._objects.items())

    @property
    def age_s(self) -> float:
        """Seconds since the server last gave word: a list, an event, a bookmark, or the end of a watch in order."""
        return self._clock() - self._spoke_at_s

    async def run(self) -> None:
        """Mirror until cancelled; errors are logged, once for each that differs from the last, and outlived."""
        while True:
            try:
                await self._list()
                await self._follow()
            except KubeError as error:
                await self._pause(error, "a watch failed, trying again")

    async def _list(self) -> None:
        """Take the whole collection over."""
        present: dict[Key, T] = {}
        try:
            async for page in pages(self._client, self._path, query=self._query):
                self._observer.api_request("LIST", 200)
                version = page.version
                present |= {_key(body): self._read(body) for body in page.objects}
        except KubeError as error:
            self._observer.api_request("LIST", error.status)
            raise
        for key in [key for key in self._objects if key not in present]:
            self._put(key, None)
        for key, value in present.items():
            self._put(key, value)
        self._spoke_at_s = self._clock()
        self._version = version
        self.listed.set()

    async def _follow(self) -> None:
        """Take over what happens from now on. Raises KubeError when the server cannot go on from where we are."""
        while True:
            began_s = self._clock()
            try:
                await self._watch()
            except KubeError as error:
                if error.status:
                    raise
                # The connection broke: what we have is as good as it was, unless the server says otherwise.
                await self._pause(error, "a watch broke off, going on")
                continue
            if self._clock() - began_s < _SHORT_S:
                await asyncio.sleep(_FIRST_WAIT_S)  # A proxy may end every watch as soon as it begins.

    async def _watch(self) -> None:
        """Take over one watch's events; its end, too, is word from the server."""
        query = [*self._query, ("resourceVersion", self._version)]
        async with aclosing(self._client.watch(self._path, query=query)) as events:
            self._observer.api_request("WATCH", 200)
            async for event in events:
                self._heard()
                self._version = event.version or self._version
                if event.type in ("ADDED", "MODIFIED"):
                    self._put(_key(event.object), self._read(event.object))
                elif event.type == "DELETED":
                    self._put(_key(event.object), None)
        self._heard()

    def _heard(self) -> None:
        """Note that the server lets us watch. A list alone says less: it may be allowed and the watch be refused."""
        self._spoke_at_s = self._clock()
        self._wait_s, self._said = _FIRST_WAIT_S, ""

    async def _pause(self, error: KubeError, what: str) -> None:
        """Sleep after a failure, for longer after each in a row, and for as long as the server asks."""
        if not error.expired and str(error) != self._said:
            self._log.warning(what, kind=self.kind, error=str(error))
            self._said = str(error)
        await asyncio.sleep(max(self._wait_s, error.retry_after_s or 0.0))
        self._wait_s = min(_LONGEST_WAIT_S, 2 * self._wait_s)

    def _put(self, key: Key, value: T | None) -> None:
        before = self._objects.get(key)
        if value is None:
            self._objects.pop(key, None)
        else:
            self._objects[key] = value
        if before != value:
            self._listener(key, before, value)


def _key(body: Mapping[str, Any]) -> Key:
    metadata = body.get("metadata") or {}
    return str(metadata.get("namespace", "")), str(metadata.get("name", ""))
