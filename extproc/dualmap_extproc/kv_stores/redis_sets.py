"""Reads the holders of chunks from sorted sets in Redis, one set per key with members ``ip:port``, as Llumnix does."""

from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from dualmap.kv_store.view import HOLDERS_MAX, Chunk
from dualmap_extproc.kv_stores.contract import Question, StoreError, host_of

CONNECTIONS_MAX: Final = 16
"""The most questions to one server at the same time."""
_MEMBER_LONGEST: Final = 300


class RedisSetsClient:
    """A client of the Redis server at ``endpoint`` (``redis://HOST:PORT/DB``)."""

    def __init__(self, endpoint: str) -> None:
        parts = urlsplit(endpoint)
        self._shown = f"redis://{parts.netloc}"
        # More questions wait for a connection, as long as their callers do.
        connections = BlockingConnectionPool(
            max_connections=CONNECTIONS_MAX,
            timeout=None,
            host=parts.hostname or "",
            port=parts.port or 6379,
            db=int(parts.path.strip("/") or 0),
            retry=Retry(NoBackoff(), 0),
        )
        self._redis = Redis.from_pool(connections)

    async def ask(self, question: Question) -> Mapping[str, Chunk]:
        """Return the chunks of a question (``StoreClient``)."""
        try:
            async with self._redis.pipeline(transaction=False) as pipeline:
                for key in question.keys:
                    pipeline.zrange(key, 0, HOLDERS_MAX - 1)
                replies = await pipeline.execute(raise_on_error=True)
        except (RedisError, OSError) as error:
            # A timeout belongs to the caller's deadline.
            if isinstance(error, TimeoutError):
                raise
            raise StoreError(f"{self._shown}: {_said(error)}") from error
        return {
            key: Chunk(is_held=True, holders=frozenset(map(_host, members)))
            for key, members in zip(question.keys, replies, strict=True)
            if members
        }

    async def close(self) -> None:
        """Close open connections (``StoreClient``)."""
        await self._redis.aclose()


def _host(member: Any) -> str:
    return host_of(bytes(member)[:_MEMBER_LONGEST].decode(errors="replace"))


def _said(error: Exception) -> str:
    """Return the first words of an error. The server's own texts begin with a word for the kind of the error."""
    return f"{type(error).__name__}: {str(error).splitlines()[0][:100]}" if str(error) else type(error).__name__
