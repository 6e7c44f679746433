"""HTTP messages between client, proxy and engines: the headers that pass, sessions, and answers of the proxy itself."""

import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Final, Self

import aiohttp
from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy

from dualmap_sidecar.errors import Refused
from dualmap_sidecar.outcomes import Where
from dualmap_sidecar.settings import Limits
from dualmap_sidecar.targets import CONTINUE_HEADER, PREFILLER_HEADER, PREFILLERS_HEADER

PREFILL_HEADER: Final = "x-dualmap-prefill"
"""The response header that says where the prompt was prefilled."""
REQUEST_ID_HEADER: Final = "X-Request-Id"
RANK_HEADER: Final = "x-data-parallel-rank"
"""The rank of the decode engine that gets a request."""

# RFC 9110, section 7.6.1, and headers of the time before it. The proxy itself answers ``Expect``.
_HOP_BY_HOP: Final = (
    "Connection", "Keep-Alive", "Proxy-Connection", "Proxy-Authenticate", "Proxy-Authorization", "TE", "Trailer",
    "Transfer-Encoding", "Upgrade", "Expect",
)  # fmt: skip
_FOR_THE_PROXY: Final = (PREFILLER_HEADER, PREFILLERS_HEADER, CONTINUE_HEADER)
_NO_AUTOMATIC_HEADERS: Final = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")


def open_session(limits: Limits) -> aiohttp.ClientSession:
    """Return a session that changes no message: no redirects, cookies, decompression or proxies."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=limits.engine_idle_s),
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=_NO_AUTOMATIC_HEADERS,
        auto_decompress=False,
        trust_env=False,
        max_line_size=limits.header_bytes,
        max_field_size=limits.header_bytes,
        max_headers=limits.headers,
    )


def forwarded(headers: "CIMultiDictProxy[str]") -> "CIMultiDict[str]":
    """Return the headers of a message that pass the proxy."""
    passed = CIMultiDict(headers)
    listed = [name.strip() for value in headers.getall("Connection", ()) for name in value.split(",")]
    for name in (*_HOP_BY_HOP, *_FOR_THE_PROXY, *listed):
        passed.popall(name, None)
    return passed


def for_prefiller(headers: "CIMultiDict[str]") -> "CIMultiDict[str]":
    """Return the headers of the request to a prefiller, whose answer the proxy reads.

    The rank is that of the decode engine.
    """
    passed = CIMultiDict(headers)
    for name in ("Host", "Content-Length", "Accept-Encoding", RANK_HEADER):
        passed.popall(name, None)
    return passed


def refusal(error: Refused) -> web.Response:
    """Return an error of the proxy itself, in OpenAI's format."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    body = {"error": {"message": error.message, "type": kind, "code": error.code}}
    return web.Response(body=json.dumps(body).encode(), status=error.status, content_type="application/json")


@dataclass(slots=True, kw_only=True)
class EngineAnswer:
    """An engine's answer, whose head has arrived. ``where`` says where the prompt was prefilled, None without a prompt.

    ``first`` are the first bytes of the body, and ``rest`` is the connection with the others.
    """

    status: int
    reason: str | None
    headers: "CIMultiDictProxy[str]"
    where: Where | None
    first: bytes = b""
    rest: aiohttp.ClientResponse | None = None

    @classmethod
    def of(cls, response: aiohttp.ClientResponse, where: Where | None) -> Self:
        """Return the answer whose head is that of ``response``."""
        return cls(status=response.status, reason=response.reason, headers=response.headers, where=where, rest=response)

    @property
    def is_stream(self) -> bool:
        """Whether the body is a stream of events."""
        kind = self.headers.get("Content-Type", "")
        return self.status == 200 and kind.startswith("text/event-stream") and "Content-Encoding" not in self.headers

    async def has_begun(self, is_failure: Callable[[int, bytes], bool]) -> bool:
        """Wait for the first bytes of the body; return False if they are a failure or do not arrive."""
        assert self.rest is not None
        try:
            self.first += await self.rest.content.readany()
        except (aiohttp.ClientError, OSError):
            return False
        except BaseException:
            self.close()
            raise
        return not is_failure(self.status, self.first)

    def head(self) -> web.StreamResponse:
        """Return the answer to the client, with the engine's head."""
        headers = forwarded(self.headers)
        headers.popall(PREFILL_HEADER, None)
        if self.where is not None:
            headers[PREFILL_HEADER] = self.where.value
        return web.StreamResponse(status=self.status, reason=self.reason, headers=headers)

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives. Raises ClientError if the engine does not complete it."""
        if self.first:
            yield self.first
        if self.rest is not None:
            async for piece in self.rest.content.iter_any():
                yield piece

    def close(self) -> None:
        """Release the connection, and close it if the answer is incomplete: the engine then ends the request."""
        if self.rest is not None:
            self.rest.release()
