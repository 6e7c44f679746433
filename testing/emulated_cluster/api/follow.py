"""A collection of the API server, followed: all of it now, and again after each change.

``volumes.py`` follows the ConfigMaps and Secrets of pods by it, ``services`` Services and endpoints.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Final

from dualmap_edge.kube.client import KubeClient, KubeError
from emulated_cluster.api.retries import RETRY_S, passing

Object = Mapping[str, Any]

_LIST_TIMEOUT_S: Final = 30.0


async def follow(
    client: KubeClient, path: str, *, query: Sequence[tuple[str, str]] = ()
) -> AsyncGenerator[Mapping[str, Object], None]:
    """Yield the objects of a collection by ``namespace/name``, first as they are and then after every change.

    An API server that goes away is waited for. Raises KubeError for what waiting does not mend. Close it when done.
    """
    while True:
        try:
            listed = await client.request("GET", path, query=query, timeout_s=_LIST_TIMEOUT_S)
            objects = {_key(each): each for each in listed["items"]}
            yield dict(objects)
            version = listed["metadata"]["resourceVersion"]
            while True:
                asked = (*query, ("resourceVersion", version))
                async with contextlib.aclosing(client.watch(path, query=asked)) as events:
                    async for event in events:
                        version = event.object["metadata"]["resourceVersion"]
                        if event.type == "BOOKMARK":
                            continue
                        if event.type == "DELETED":
                            objects.pop(_key(event.object), None)
                        else:
                            objects[_key(event.object)] = event.object
                        yield dict(objects)
        except KubeError as error:
            if not passing(error) and not error.expired:
                raise
        await asyncio.sleep(RETRY_S)


def _key(item: Object) -> str:
    return f"{item['metadata']['namespace']}/{item['metadata']['name']}"
