"""Every version of a pool and its StatefulSet in the order of the writes, from a watch of the API server.

etcd has one sequence of resource versions for all objects. The versions therefore show whether a pool's status or its
StatefulSet was written first. Polling misses versions. ``emulated_cluster.api.follow`` also misses versions, because it
lists again after a broken watch. This watch continues from the last received version, if the API server still has this
version.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

from emulated_cluster.api.client import ApiClient, ApiError

_RETRY_S: Final = 0.2
_KINDS: Final = {"serving.dualmap.dev/v1alpha1": "inferencepools", "apps/v1": "statefulsets"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shrink:
    """One scale-down of a StatefulSet, with the states of the removed members in the pool's status at that time."""

    before: int
    after: int
    victims: tuple[str, ...]


class History:
    """The versions of one pool and its StatefulSet since ``recording`` began."""

    def __init__(self, client: ApiClient, namespace: str, name: str) -> None:
        self._client = client
        self._namespace = namespace
        self._name = name
        self._versions: list[dict[str, Any]] = []

    @asynccontextmanager
    async def recording(self) -> AsyncIterator["History"]:
        """Record the pool's and the StatefulSet's versions while the context is open, also across restarts of the API
        server.
        """
        paths = [f"/apis/{group}/namespaces/{self._namespace}/{kind}" for group, kind in _KINDS.items()]
        followers = [asyncio.create_task(self._follow(path, await self._list(path))) for path in paths]
        try:
            yield self
        finally:
            for follower in followers:
                follower.cancel()
            ends = await asyncio.gather(*followers, return_exceptions=True)
        assert [end for end in ends if isinstance(end, Exception)] == []

    def shrinks(self) -> list[Shrink]:
        """Return every scale-down of the StatefulSet."""
        found = []
        states: dict[str, str] = {}
        size = 0
        for each in self._in_order():
            if each["kind"] == "InferencePool":
                states = _states(each)
                continue
            before, size = size, each["spec"]["replicas"]
            if size < before:
                victims = tuple(states.get(f"{self._name}-{number}", "left") for number in range(size, before))
                found.append(Shrink(before=before, after=size, victims=victims))
        return found

    def fewest_active(self) -> int:
        """Return the lowest number of Active members."""
        rings = [_states(each) for each in self._in_order() if each["kind"] == "InferencePool"]
        return min(sum(state == "Active" for state in ring.values()) for ring in rings)

    def _in_order(self) -> list[dict[str, Any]]:
        return sorted(self._versions, key=lambda each: int(each["metadata"]["resourceVersion"]))

    async def _list(self, path: str) -> str:
        answer = await self._client.request("GET", path)
        for each in answer["items"]:
            # The items of a list have no field `kind`.
            self._take(each | {"kind": answer["kind"].removesuffix("List")})
        version: str = answer["metadata"]["resourceVersion"]
        return version

    async def _follow(self, path: str, listed: str) -> None:
        version: str | None = listed
        while True:
            try:
                if version is None:
                    version = await self._list(path)
                watch = self._client.watch(path, query=(("resourceVersion", version),))
                async with contextlib.aclosing(watch) as events:
                    async for event in events:
                        version = event.object["metadata"]["resourceVersion"]
                        if event.type in ("ADDED", "MODIFIED"):
                            self._take(event.object)
            except ApiError as error:
                # The API server restarts. If it no longer has the last received version, the recording continues with a
                # new list.
                if error.expired:
                    version = None
                await asyncio.sleep(_RETRY_S)

    def _take(self, body: dict[str, Any]) -> None:
        if body["metadata"]["name"] == self._name:
            self._versions.append(body)


def _states(pool: dict[str, Any]) -> dict[str, str]:
    ring = pool.get("status", {}).get("ring", {})
    return {member["id"]: member["state"] for member in ring.get("members", [])}
