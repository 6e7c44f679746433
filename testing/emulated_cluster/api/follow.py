"""Keeps a local copy of an API server collection, with the list-watch loop of the operator and the router.

The kubelet follows its pods, and the ConfigMaps and Secrets that the pods' volumes use. ``services`` follows Services
and endpoints.
"""

import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NoReturn, Protocol

from dualmap_edge.kube.client import Page, WatchEvent
from dualmap_edge.kube.errors import KubeError
from dualmap_edge.kube.watch import Reflector, WatchPolicy
from emulated_cluster.api.client import ApiClient, ApiError
from emulated_cluster.api.retries import RETRY_S, is_temporary

Object = Mapping[str, Any]

_LIST_TIMEOUT_S: Final = 30.0
_POLICY: Final = WatchPolicy(timeout_s=45.0, inactivity_s=55.0, first_pause_s=RETRY_S, longest_pause_s=RETRY_S)


class Store(Protocol):
    """Receives the objects of a collection."""

    def replace(self, objects: Sequence[Object]) -> None:
        """Process the result of a list: all existing objects."""

    def put(self, item: Object) -> None:
        """Process an added or modified object."""

    def remove(self, item: Object) -> None:
        """Process the last version of a deleted object."""


class Mirror:
    """A store of objects by ``namespace/name``; after each change it passes all objects to ``changed``."""

    def __init__(self, changed: Callable[[Mapping[str, Object]], None]) -> None:
        self._objects: dict[str, Object] = {}
        self._changed = changed

    def replace(self, objects: Sequence[Object]) -> None:
        """Replace all stored objects."""
        self._objects = {_key(each): each for each in objects}
        self._changed(dict(self._objects))

    def put(self, item: Object) -> None:
        """Store this version of an object."""
        self._objects[_key(item)] = item
        self._changed(dict(self._objects))

    def remove(self, item: Object) -> None:
        """Remove an object."""
        self._objects.pop(_key(item), None)
        self._changed(dict(self._objects))


class _Collection:
    """Lists and watches the objects at ``path`` with the emulated cluster's client.

    Raises KubeError, which the list-watch loop expects.
    """

    def __init__(self, client: ApiClient, path: str, query: Sequence[tuple[str, str]]) -> None:
        self._client = client
        self._path = path
        self._query = query

    async def pages(self) -> AsyncGenerator[Page, None]:
        """Yield the whole collection as one page."""
        with _kube_errors():
            listed = await self._client.request("GET", self._path, query=self._query, timeout_s=_LIST_TIMEOUT_S)
        yield Page(objects=listed["items"], version=listed["metadata"]["resourceVersion"])

    async def watch(self, version: str, *, timeout_s: float, inactivity_s: float) -> AsyncGenerator[WatchEvent, None]:
        """Yield the events after ``version``; return when the server ends the watch."""
        query = (*self._query, ("resourceVersion", version))
        watch = self._client.watch(self._path, query=query, timeout_s=timeout_s, inactivity_s=inactivity_s)
        with _kube_errors():
            async with contextlib.aclosing(watch) as events:
                async for event in events:
                    yield WatchEvent(type=event.type, object=event.object)


async def follow(client: ApiClient, path: str, store: Store, *, query: Sequence[tuple[str, str]] = ()) -> NoReturn:
    """Keep ``store`` equal to the collection on the API server until cancelled; retry while the server is down.

    Raises ApiError for a permanent error. ``dualmap_edge.kube.watch`` has the list-watch loop.
    """

    def failed(error: KubeError) -> None:
        ours = ApiError(error.status, error.message)
        if not is_temporary(ours) and not ours.expired:
            raise ours

    reflector = Reflector(
        _Collection(client, path, query),
        store,
        kind=path,
        read=lambda item: item,
        policy=_POLICY,
        clock=time.monotonic,
        on_failure=failed,
    )
    await reflector.run()


@contextlib.contextmanager
def _kube_errors() -> Iterator[None]:
    try:
        yield
    except ApiError as error:
        raise KubeError(error.status, error.message) from error


def _key(item: Object) -> str:
    return f"{item['metadata']['namespace']}/{item['metadata']['name']}"
