"""Asks HTTP servers that are not trusted: without redirects, proxies and cookies, and with answers of bounded size."""

from typing import Final

import aiohttp

_CHUNK_BYTES: Final = 64 * 1024


class AnswerTooLarge(Exception):
    """An answer is larger than the caller accepts."""


def open_session(*, connections_max: int) -> aiohttp.ClientSession:
    """Return a session with kept-alive connections, at most ``connections_max`` to one server.

    Answers are not decompressed, because the decompressed size has no limit. The caller sets the deadlines, and must
    pass ``allow_redirects=False`` with each request.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, limit_per_host=connections_max),
        cookie_jar=aiohttp.DummyCookieJar(),
        headers={"Accept-Encoding": "identity", "User-Agent": "dualmap-router"},
        timeout=aiohttp.ClientTimeout(),
        auto_decompress=False,
        trust_env=False,
    )


async def read_answer(response: aiohttp.ClientResponse, *, max_bytes: int) -> bytes:
    """Return the body of a response. Raises AnswerTooLarge when it has more than ``max_bytes`` bytes."""
    answer = bytearray()
    async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
        answer += chunk
        if len(answer) > max_bytes:
            raise AnswerTooLarge
    return bytes(answer)
