"""One loop for every emulated part that follows a collection: list it, watch it, and list it again where needed.

The kubelet follows its pods and the ConfigMaps and Secrets of their volumes by it, ``services`` Services and endpoints.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NoReturn, Protocol

from emulated_cluster.api.client import ApiClient, ApiError
from emulated_cluster.api.retries import RETRY_S, is_temporary

Object = Mapping[str, Any]

_LIST_TIMEOUT_S: Final = 30.0


class Store(Protocol):
    """Receives the objects of a collection."""

    def replace(self, objects: Sequence[Object]) -> None:
        """Take the result of a list: everything that exists now."""

    def put(self, item: Object) -> None:
        """Take an object that was added or modified."""

    def remove(self, item: Object) -> None:
        """Take an object that was deleted, as it was at last."""


class Mirror:
    """A store that keeps the objects by ``namespace/name`` and passes all of them to ``changed`` after each change."""

    def __init__(self, changed: Callable[[Mapping[str, Object]], None]) -> None:
        self._objects: dict[str, Object] = {}
        self._changed = changed

    def replace(self, objects: Sequence[Object]) -> None:
        """Keep exactly these objects."""
        self._objects = {_key(each): each for each in objects}
        self._changed(dict(self._objects))

    def put(self, item: Object) -> None:
        """Keep this version of an object."""
        self._objects[_key(item)] = item
        self._changed(dict(self._objects))

    def remove(self, item: Object) -> None:
        """Drop an object."""
        self._objects.pop(_key(item), None)
        self._changed(dict(self._objects))


async def follow(client: ApiClient, path: str, store: Store, *, query: Sequence[tuple[str, str]] = ()) -> NoReturn:
    """Keep ``store`` as the API server has the collection, until cancelled; wait while the server is away.

    Raises ApiError for an error that does not pass by waiting.
    """
    while True:
        try:
            listed = await client.request("GET", path, query=query, timeout_s=_LIST_TIMEOUT_S)
            store.replace(listed["items"])
            version = listed["metadata"]["resourceVersion"]
            while True:
                version = await _watch(client, path, store, (*query, ("resourceVersion", version)), version)
        except ApiError as error:
            if not is_temporary(error) and not error.expired:
                raise
        await asyncio.sleep(RETRY_S)


async def _watch(client: ApiClient, path: str, store: Store, query: Sequence[tuple[str, str]], version: str) -> str:
    """Pass the events of one watch to ``store``; return the version from which the next watch continues."""
    async with contextlib.aclosing(client.watch(path, query=query)) as events:
        async for event in events:
            version = event.version
            if event.type in {"ADDED", "MODIFIED"}:
                store.put(event.object)
            elif event.type == "DELETED":
                store.remove(event.object)
    return version


def _key(item: Object) -> str:
    return f"{item['metadata']['namespace']}/{item['metadata']['name']}"
