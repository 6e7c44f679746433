"""Asks the master of a Mooncake store which replicas of chunks there are (``/batch_query_keys`` of its HTTP server)."""

from collections.abc import Iterator, Mapping
from typing import Final
from urllib.parse import quote

from dualmap.kv_store.view import HOLDERS_MAX, Chunk
from dualmap_extproc.kv_stores.contract import Question, StoreError, host_of
from dualmap_extproc.kv_stores.http_client import HttpClient

_ENDPOINT_LONGEST: Final = 300


class MooncakeClient:
    """A client of the master whose HTTP server is at ``endpoint``. The question takes no lease on the chunks."""

    def __init__(self, endpoint: str) -> None:
        self._http = HttpClient(endpoint)

    async def ask(self, question: Question) -> Mapping[str, Chunk]:
        """Return the chunks of a question (``StoreClient``)."""
        keys = quote(",".join(question.keys), safe=",@:")
        answer = await self._http.get(f"/batch_query_keys?keys={keys}")
        data = answer.get("data")
        if answer.get("success") is not True or not isinstance(data, dict):
            raise StoreError(f"the master's answer has no data: {str(answer.get('error'))[:100]}")
        found: dict[str, Chunk] = {}
        for key in question.keys:
            entry = data.get(key)
            if not isinstance(entry, dict) or not isinstance(entry.get("ok"), bool):
                raise StoreError("the master's answer lacks a key, or says not whether it exists")
            if entry["ok"]:
                found[key] = Chunk(is_held=True, holders=frozenset(_hosts(entry.get("values"))))
        return found

    async def close(self) -> None:
        """Close open connections (``StoreClient``)."""
        await self._http.close()


def _hosts(values: object) -> Iterator[str]:
    """Yield the hosts of the replicas in memory. Replicas on disks name no host."""
    for each in values[:HOLDERS_MAX] if isinstance(values, list) else ():
        endpoint = each.get("transport_endpoint_") if isinstance(each, dict) else None
        if isinstance(endpoint, str) and 0 < len(endpoint) <= _ENDPOINT_LONGEST:
            yield host_of(endpoint)
