"""An HTTP client for small GET requests to engines, whose answers are bounded in size and time.

The client requests fixed paths at a member's IP address and port, and nothing else: it follows no redirect, uses no
proxy, no DNS and no cookies, and sends no credentials.
"""

import asyncio
import json
import os
from enum import Enum
from typing import Final

from dualmap.pools.pool import Member
from dualmap_extproc.engines.http_answer import HEAD_MAX_BYTES, AnswerError, read_answer

TIMEOUT_S: Final = 1.0
"""The longest time for one answer."""
PAGE_MAX_BYTES: Final = 1024 * 1024
"""The largest answer. A metrics page of a real engine has 59 KB for each data-parallel rank."""
DOCUMENT_MAX_BYTES: Final = 256 * 1024
"""The largest answer in JSON, which takes far more time for each byte. 256 adapters of a real engine have 150 KB."""
AT_ONCE: Final = 64
"""The most requests at the same time for the load of engines that answered their last request, over all pools."""
PAGES_AT_ONCE: Final = 16
"""The most requests at the same time for other pages, which must not delay the load of other engines."""
SILENT_AT_ONCE: Final = 16
"""The most requests at the same time to all other engines, whose timeouts must not delay the first ones."""


class Kind(Enum):
    """The kinds of requests; each has a limit of its own for requests at the same time."""

    LOAD = "load"
    PAGE = "page"
    SILENT = "silent"


class EngineClient:
    """Connects to engines, and limits the requests at the same time."""

    def __init__(self) -> None:
        limits = {Kind.LOAD: AT_ONCE, Kind.PAGE: PAGES_AT_ONCE, Kind.SILENT: SILENT_AT_ONCE}
        self._turns = {kind: asyncio.Semaphore(limit) for kind, limit in limits.items()}

    def connect(self, member: Member) -> "EngineConnection":
        """Return a connection to a member's engine, which opens with the first request."""
        return EngineConnection(member, self._turns)


class EngineConnection:
    """Requests pages from one engine, one after the other, over a connection that stays open if the engine allows it.

    Close it after use.
    """

    def __init__(self, member: Member, turns: dict[Kind, asyncio.Semaphore]) -> None:
        self._member = member
        self._turns = turns
        # Without the zone of a link-local address, which is no part of a host's name (RFC 9110, section 7.2).
        host = member.endpoint if "%" not in member.address else f"[{member.address.partition('%')[0]}]:{member.port}"
        self._fields = f"Host: {host}\r\nAccept: */*\r\nAccept-Encoding: identity\r\nUser-Agent: dualmap-router\r\n\r\n"
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def page(self, path: str, kind: Kind, *, most: int = PAGE_MAX_BYTES) -> bytes:
        """Return a page's content. Raises AnswerError if it is missing, late, incomplete, or above ``most`` bytes."""
        async with self._turns[kind]:
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    return await self._get(path, most)
            except TimeoutError:
                self.close()
                raise AnswerError(f"{path} was not answered within {TIMEOUT_S:g} s", silent=True) from None
            except OSError as error:
                self.close()
                raise AnswerError(f"{path}: no connection ({_said(error)})", silent=True) from error
            except (ValueError, EOFError, asyncio.LimitOverrunError) as error:
                self.close()
                raise AnswerError(f"{path}: no valid HTTP answer ({_fault(error)})") from error
            except BaseException:
                self.close()
                raise

    async def document(self, path: str) -> object:
        """Return a page's content as a JSON value. Raises AnswerError as ``page`` does, and if it is not JSON."""
        page = await self.page(path, Kind.PAGE, most=DOCUMENT_MAX_BYTES)
        try:
            return json.loads(page)
        except (ValueError, RecursionError):
            raise AnswerError(f"{path} is not JSON") from None

    def close(self) -> None:
        """Close the connection; the next request opens another one."""
        if self._streams is not None:
            # A close in order would wait for the other end.
            self._streams[1].transport.abort()
            self._streams = None

    async def _get(self, path: str, most: int) -> bytes:
        was_open = self._streams is not None
        try:
            return await self._ask(path, most)
        except (ConnectionError, EOFError):
            # The engine may close a connection at any time between two requests.
            if not was_open:
                raise
            self.close()
            return await self._ask(path, most)

    async def _ask(self, path: str, most: int) -> bytes:
        if self._streams is None:
            address, port = self._member.address, self._member.port
            self._streams = await asyncio.open_connection(address, port, limit=HEAD_MAX_BYTES)
        reader, writer = self._streams
        writer.write(f"GET {path} HTTP/1.1\r\n{self._fields}".encode())
        answer = await read_answer(reader, path, most=most)
        if not answer.keeps_open:
            self.close()
        return answer.content


def _said(error: OSError) -> str:
    """Return an error's text without the address, which asyncio adds and the dashboard must not show."""
    return os.strerror(error.errno) if error.errno else type(error).__name__


def _fault(error: Exception) -> str:
    match error:
        case EOFError():
            return "it ends early"
        case asyncio.LimitOverrunError():
            return "a line or the head is too long"
        case _:
            return str(error)
