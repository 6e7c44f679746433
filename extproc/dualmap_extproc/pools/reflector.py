"""One collection of a Kubernetes API, kept up to date: listed, then watched, then listed again where that is needed.

``pools.kube`` runs one for the pools and one for the pods of each pool. What is known stays known while the API server
is away, a watch that was cut without a word is noticed by its silence, and how old the news is shows as a metric.
"""

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final, NoReturn, Protocol

from dualmap_edge.kube.client import WATCH_INACTIVITY_S, WATCH_TIMEOUT_S, KubeClient, KubeError, pages
from dualmap_edge.logs import get_logger

# A watch that ended sooner is not opened again at once: a proxy may end every watch as soon as it begins.
_SHORT_S: Final = 1.0
_log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long to wait for a silent server, and between attempts; the pauses double up to the longest, less a half."""

    watch_s: float = WATCH_TIMEOUT_S
    inactivity_s: float = WATCH_INACTIVITY_S
    first_pause_s: float = 0.5
    longest_pause_s: float = 10.0

    def pause_s(self, failures: int) -> float:
        """Return the pause after so many failures in a row, at random so that routers do not come all at once."""
        return min(self.longest_pause_s, self.first_pause_s * 2.0 ** min(failures - 1, 30)) * random.uniform(0.5, 1.0)


class KubeObserver(Protocol):
    """Who counts what happens between this router and the API server; ``metrics`` does."""

    def kube_listed(self, resource: str) -> None:
        """Count a list of a collection."""

    def kube_failed(self, resource: str, kind: str) -> None:
        """Count a list or watch that failed: ``unreached``, ``refused`` or ``expired``."""


class Sink(Protocol):
    """Who takes what the API server says of a collection; neither method may raise."""

    def listed(self, objects: Sequence[Mapping[str, Any]]) -> None:
        """Take all objects there are."""

    def changed(self, kind: str, body: Mapping[str, Any]) -> None:
        """Take one object that was ADDED or MODIFIED, or DELETED."""


class Reflector:
    """Tells ``sink`` of the objects at ``path`` (of those ``selector`` matches, where it is not empty), for ever."""

    def __init__(
        self,
        client: KubeClient,
        path: str,
        sink: Sink,
        observer: KubeObserver,
        *,
        resource: str,
        selector: str = "",
        patience: Patience,
    ) -> None:
        self._client = client
        self._path = path
        self._sink = sink
        self._observer = observer
        self._resource = resource
        self._query = [("labelSelector", selector)] if selector else []
        self._patience = patience
        self._clock: Callable[[], float] = asyncio.get_running_loop().time
        self._heard_s = self._clock()
        self._failures = 0
        self._said = ""

    def age_s(self) -> float:
        """Return how long ago the server last spoke; safe in any thread. At rest up to a watch's length."""
        return self._clock() - self._heard_s

    async def run(self) -> NoReturn:
        """List and watch until cancelled; whatever fails is logged, counted and tried again."""
        watch_failed = False
        while True:
            listed = False
            try:
                version = await self._list()
                listed = True
                # Else a server that lists but lets nobody watch would be asked again and again, without longer pauses.
                self._heard(recovered=not watch_failed)
                await self._follow(version)
            except KubeError as error:
                watch_failed = listed
                self._failures += 1
                self._tell(error)
                await asyncio.sleep(max(self._patience.pause_s(self._failures), error.retry_after_s or 0.0))

    async def _list(self) -> str:
        """Give the sink every object; return the version that a watch continues from."""
        objects: list[Mapping[str, Any]] = []
        async for page in pages(self._client, self._path, query=self._query):
            objects.extend(page.objects)
            version = page.version
        self._observer.kube_listed(self._resource)
        self._sink.listed(objects)
        return version

    async def _follow(self, version: str) -> NoReturn:
        """Watch from a version on, again and again; raises KubeError when only a new list helps."""
        while True:
            began_s = self._clock()
            watch = self._client.watch(
                self._path,
                query=[*self._query, ("resourceVersion", version)],
                timeout_s=self._patience.watch_s,
                inactivity_s=self._patience.inactivity_s,
            )
            async with aclosing(watch) as events:
                async for event in events:
                    self._heard(recovered=True)
                    version = event.version or version
                    if event.type != "BOOKMARK":
                        self._sink.changed(event.type, event.object)
            self._heard(recovered=True)
            if self._clock() - began_s < _SHORT_S:
                await asyncio.sleep(self._patience.pause_s(1))

    def _heard(self, *, recovered: bool) -> None:
        self._heard_s = self._clock()
        if not recovered:
            return
        self._failures = 0
        if self._said:
            self._said = ""
            _log.info("the Kubernetes API answers again", resource=self._resource, path=self._path)

    def _tell(self, error: KubeError) -> None:
        """Count a failure, and log it unless it is the one logged last."""
        kind = "expired" if error.expired else "refused" if error.status else "unreached"
        self._observer.kube_failed(self._resource, kind)
        # A version expires in the course of things; the list that follows is all it takes.
        if not error.expired and str(error) != self._said:
            self._said = str(error)
            _log.warning(
                "the Kubernetes API cannot be read; what is known serves on",
                resource=self._resource,
                path=self._path,
                reason=str(error),
                known_s_ago=round(self.age_s(), 1),
            )
