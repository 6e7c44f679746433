"""Asks LMCache which chunks any of its instances has: the coordinator of the multi-process mode, or the controller.

The coordinator (``POST /directory/lookup``) computes the chunks' hashes itself, from the token ids. The controller
(``POST /lookup``), which is deprecated, names one instance per chunk and only the end of its last one. Its answer
therefore counts as chunks that an unknown instance has. LMCache names instances and not their hosts.
"""

from collections.abc import Mapping
from typing import Any

from dualmap.kv_store.view import Chunk
from dualmap_extproc.kv_stores.contract import Question, StoreError
from dualmap_extproc.kv_stores.http_client import HttpClient, NotFound


class LmCacheClient:
    """A client of the server at ``endpoint`` for a model. A chunk has a part for each of ``world_size`` ranks."""

    def __init__(self, endpoint: str, *, model: str, chunk_tokens: int, world_size: int) -> None:
        self._http = HttpClient(endpoint)
        self._model = model
        self._chunk_tokens = chunk_tokens
        self._world_size = world_size
        self._is_controller = False

    async def ask(self, question: Question) -> Mapping[str, Chunk]:
        """Return the chunks of a question (``StoreClient``)."""
        try:
            return await (self._ask_controller(question) if self._is_controller else self._ask_coordinator(question))
        except NotFound:
            # The next question goes to the other kind of server.
            self._is_controller = not self._is_controller
            raise

    async def close(self) -> None:
        """Close open connections (``StoreClient``)."""
        await self._http.close()

    async def _ask_coordinator(self, question: Question) -> dict[str, Chunk]:
        answer = await self._http.post(
            "/directory/lookup",
            {
                "token_ids": self._ids(question),
                "model_name": self._model,
                "world_size": self._world_size,
                "cache_salt": question.salt,
            },
        )
        chunks, results = answer.get("chunks"), answer.get("results")
        if not isinstance(chunks, int) or not isinstance(results, list):
            raise StoreError("the coordinator's answer has no chunks and results")
        if chunks != len(question.chunks):
            raise StoreError(
                f"the coordinator has {chunks} chunks of a prompt with {len(question.chunks)} chunks of "
                f"{self._chunk_tokens} tokens; give its chunk size as spec.kvStore.chunkTokens"
            )
        held: dict[str, bool] = {}
        for each in results:
            digest, placements = _placements(each)
            held[digest] = held.get(digest, True) and bool(placements)
        if len(held) != chunks:
            raise StoreError(f"the coordinator's answer has results for {len(held)} of {chunks} chunks")
        return {key: Chunk(is_held=is_held) for key, is_held in zip(question.chunks, held.values(), strict=True)}

    async def _ask_controller(self, question: Question) -> dict[str, Chunk]:
        answer = await self._http.post("/lookup", {"tokens": self._ids(question)})
        layout = answer.get("layout_info")
        if not isinstance(layout, dict):
            raise StoreError("the controller's answer has no layout_info")
        ends = [_end(each) for each in layout.values()]
        chunks = max(ends, default=0) // self._chunk_tokens
        return {key: Chunk(is_held=True) for key in question.chunks[:chunks]}

    def _ids(self, question: Question) -> list[int]:
        return question.ids[: len(question.chunks) * self._chunk_tokens].tolist()


def _placements(result: Any) -> tuple[str, list[object]]:
    """Return the hash of a result's chunk, and the placements of one rank's part of the chunk."""
    key = result.get("key") if isinstance(result, dict) else None
    digest = key.get("chunk_hash_hex") if isinstance(key, dict) else None
    placements = result.get("placements") if isinstance(result, dict) else None
    if not isinstance(digest, str) or not isinstance(placements, list):
        raise StoreError("a result of the coordinator has no chunk_hash_hex and placements")
    return digest, placements


def _end(place: object) -> int:
    """Return the number of tokens in a value of ``layout_info``: a location, and the end of the last chunk."""
    if isinstance(place, list) and len(place) == 2 and isinstance(place[1], int) and place[1] >= 0:
        return place[1]
    raise StoreError("a value of the controller's layout_info is not a location and a number of tokens")
