"""Reads requests' bodies whole, within a limit for each body and a limit for all of them."""

import asyncio
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager

from aiohttp import web

from dualmap_sidecar.errors import Refused
from dualmap_sidecar.settings import Limits


class Bodies:
    """The bodies that the proxy holds."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._held_bytes = 0

    @property
    def held_bytes(self) -> int:
        """The size of all bodies that the proxy holds."""
        return self._held_bytes

    @asynccontextmanager
    async def whole(self, request: web.BaseRequest) -> AsyncGenerator[bytes, None]:
        """Yield the body of a request, and hold it meanwhile. Raises Refused."""
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._limits.body_s):
                async for part in request.content.iter_any():
                    size += len(part)
                    self._held_bytes += len(part)
                    parts.append(part)
                    self._check(size)
        except TimeoutError as error:
            self._held_bytes -= size
            message = f"the body took longer than {self._limits.body_s:g} s"
            raise Refused(408, "request_timeout", message) from error
        except web.RequestPayloadError as error:
            self._held_bytes -= size
            raise Refused(400, "invalid_request", "the body is not valid HTTP") from error
        except BaseException:
            self._held_bytes -= size
            raise
        try:
            yield b"".join(parts)
        finally:
            self._held_bytes -= size

    @contextmanager
    def kept(self, size: int) -> Generator[None, None, None]:
        """Count a body that is kept for longer than its request."""
        self._held_bytes += size
        try:
            yield
        finally:
            self._held_bytes -= size

    def _check(self, size: int) -> None:
        if size > self._limits.body_bytes:
            message = f"the body has more than {self._limits.body_bytes} bytes"
            raise Refused(413, "request_too_large", message)
        if self._held_bytes > self._limits.buffered_bytes:
            raise Refused(503, "overloaded", "the proxy holds too many bodies; try again")
