"""An HTTP client for small GET requests to engines, whose answers are bounded in size and time.

The client requests fixed paths at a member's IP address and port, and nothing else: it follows no redirect, uses no
proxy, no DNS and no cookies, and sends no credentials.
"""

import asyncio
import json
import os
from typing import Final

import aiohttp
from yarl import URL

from dualmap.pools.pool import Member

TIMEOUT_S: Final = 1.0
"""The longest time for one answer."""
PAGE_MAX_BYTES: Final = 1024 * 1024
"""The largest answer. A metrics page of a real engine has 59 KB for each data-parallel rank."""
AT_ONCE: Final = 64
"""The most requests at the same time to engines that answered their last request, over all pools."""
SILENT_AT_ONCE: Final = 16
"""The most requests at the same time to all other engines, whose timeouts must not delay the first ones."""
_CHUNK_BYTES: Final = 64 * 1024


class AnswerError(Exception):
    """An answer that cannot be used; the text says which and why. ``silent`` is true if there is no answer at all."""

    def __init__(self, text: str, *, silent: bool = False) -> None:
        super().__init__(text)
        self.silent = silent


class EngineClient:
    """Requests pages from engines over one kept-alive connection for each member."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._silent_turns = asyncio.Semaphore(SILENT_AT_ONCE)

    async def page(self, member: Member, path: str, *, silent: bool = False) -> bytes:
        """Return a page's content. Raises AnswerError if it is missing, late, incomplete or too large.

        ``silent`` is whether the engine has not answered its last request.
        """
        async with self._silent_turns if silent else self._turns:
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    return await self._get(member, path)
            except TimeoutError:
                raise AnswerError(f"{path} was not answered within {TIMEOUT_S:g} s", silent=True) from None
            except (aiohttp.ClientConnectorError, ConnectionError) as error:
                raise AnswerError(f"{path}: no connection ({_said(error)})", silent=True) from error
            except (aiohttp.ClientError, OSError, ValueError) as error:
                raise AnswerError(f"{path}: no valid HTTP answer ({type(error).__name__})") from error

    async def document(self, member: Member, path: str) -> object:
        """Return a page's content as a JSON value. Raises AnswerError as ``page`` does, and if it is not JSON."""
        page = await self.page(member, path)
        try:
            return json.loads(page)
        except (ValueError, RecursionError):
            raise AnswerError(f"{path} is not JSON") from None

    async def close(self) -> None:
        """Close open connections."""
        if self._session is not None:
            await self._session.close()

    async def _get(self, member: Member, path: str) -> bytes:
        if self._session is None:
            self._session = _session()
        url = URL.build(scheme="http", host=member.address, port=member.port, path=path)
        async with self._session.get(url, allow_redirects=False) as response:
            if response.status != 200:
                raise AnswerError(f"{path} was answered with {response.status}")
            if response.headers.get("Content-Encoding", "identity") != "identity":
                raise AnswerError(f"{path} is compressed")
            body = bytearray()
            async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
                body += chunk
                if len(body) > PAGE_MAX_BYTES:
                    raise AnswerError(f"{path} has more than {PAGE_MAX_BYTES} bytes")
            return bytes(body)


def _session() -> aiohttp.ClientSession:
    # Answers are not decompressed, because the decompressed size has no limit and decompression takes time.
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, limit_per_host=0, use_dns_cache=False),
        cookie_jar=aiohttp.DummyCookieJar(),
        headers={"Accept-Encoding": "identity", "User-Agent": "dualmap-router"},
        timeout=aiohttp.ClientTimeout(),
        auto_decompress=False,
        trust_env=False,
    )


def _said(error: OSError) -> str:
    """Return an error's text without the address, which asyncio adds and the dashboard must not show."""
    return os.strerror(error.errno) if error.errno else type(error).__name__
