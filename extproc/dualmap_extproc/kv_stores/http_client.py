"""Requests to the HTTP servers of stores, over kept-alive connections, with answers of bounded size.

The client follows no redirect, uses no proxy and no cookies, and sends none of a request's headers.
"""

import os
from typing import Any, Final

import aiohttp
import orjson
from yarl import URL

from dualmap_edge.http_answers import AnswerTooLarge, open_session, read_answer
from dualmap_extproc.kv_stores.contract import StoreError

ANSWER_MAX_BYTES: Final = 4 * 1024 * 1024
"""The largest answer. Mooncake's answer about 1024 chunks, with one holder each, has 260 KB."""
CONNECTIONS_MAX: Final = 16
"""The most requests to one store at the same time."""


class NotFound(StoreError):
    """The server does not know the path."""


class HttpClient:
    """A client of the server at ``endpoint``, such as ``http://10.0.0.9:9003``. Construct it in an event loop."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._session: aiohttp.ClientSession | None = None

    async def get(self, path: str) -> dict[str, Any]:
        """Return the JSON object that answers a GET; ``path`` is encoded. Raises StoreError."""
        return await self._request("GET", path, None)

    async def post(self, path: str, value: object) -> dict[str, Any]:
        """Return the JSON object that answers a POST with a JSON value. Raises StoreError."""
        return await self._request("POST", path, orjson.dumps(value))

    async def close(self) -> None:
        """Close open connections."""
        if self._session is not None:
            await self._session.close()

    async def _request(self, method: str, path: str, body: bytes | None) -> dict[str, Any]:
        shown = f"{self._endpoint}{path.partition('?')[0]}"
        try:
            answer = await self._read(method, path, body, shown)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            # asyncio.TimeoutError is an OSError as well, but belongs to the caller's deadline.
            if isinstance(error, TimeoutError):
                raise
            raise StoreError(f"{shown}: {_said(error)}") from error
        try:
            value = orjson.loads(answer)
        except orjson.JSONDecodeError:
            raise StoreError(f"the answer of {shown} is not JSON") from None
        if not isinstance(value, dict):
            raise StoreError(f"the answer of {shown} is not a JSON object")
        return value

    async def _read(self, method: str, path: str, body: bytes | None, shown: str) -> bytes:
        if self._session is None:
            self._session = open_session(connections_max=CONNECTIONS_MAX)
        headers = {} if body is None else {"Content-Type": "application/json"}
        url = URL(self._endpoint + path, encoded=True)
        async with self._session.request(method, url, data=body, headers=headers, allow_redirects=False) as response:
            if response.status != 200:
                kind = NotFound if response.status == 404 else StoreError
                raise kind(f"{shown} answered with {response.status}")
            try:
                return await read_answer(response, max_bytes=ANSWER_MAX_BYTES)
            except AnswerTooLarge:
                raise StoreError(f"the answer of {shown} has more than {ANSWER_MAX_BYTES} bytes") from None


def _said(error: Exception) -> str:
    """Return an error's text without the address, which the caller names."""
    if isinstance(error, OSError) and error.errno and error.errno > 0:
        return os.strerror(error.errno)
    return f"no valid HTTP answer ({type(error).__name__})"
