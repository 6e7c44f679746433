"""A Kubernetes API client: requests, lists and watches, with JSON objects instead of generated models.

``watch.Reflector`` and the operator's ``api`` use this client. The ``kubernetes`` library reads the server's address
and authenticates. A thread imports this library when a client connects, because the import takes seconds. Unlike the
library's watch, this client's watch accepts lines of any length and raises an error after a silence. Callers handle the
recovery from errors.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn, Self

import aiohttp

from dualmap.objects.pods import mapping_in, mappings_in, text_in
from dualmap_edge.kube.errors import KubeConfigError, KubeError, clipped
from dualmap_edge.kube.library import Connection, Library

__all__ = [
    "CONNECT_TIMEOUT_S",
    "WATCH_INACTIVITY_S",
    "WATCH_TIMEOUT_S",
    "Connection",
    "KubeClient",
    "KubeConfigError",
    "KubeError",
    "Page",
    "WatchEvent",
    "pages",
]

CONNECT_TIMEOUT_S: Final = 5.0
# The server ends a watch after WATCH_TIMEOUT_S. A watch without data for WATCH_INACTIVITY_S therefore has a broken
# connection.
WATCH_TIMEOUT_S: Final = 45.0
WATCH_INACTIVITY_S: Final = 55.0
# The page size limits one JSON parse to a few MB: during a synchronous parse, a router cannot route requests.
_PAGE: Final = 250
_LIST_TIMEOUT_S: Final = 30.0
# The body of a 404 response for a kind that the API server does not serve. For a missing object, the body is a Status
# object.
_NOT_SERVED: Final = b"404 page not found"


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """One event of a watch: ``type`` is ADDED, MODIFIED, DELETED or BOOKMARK; a bookmark has only a version."""

    type: str
    object: dict[str, Any]

    @property
    def version(self) -> str:
        """The resource version for a watch after this event; empty if the object has no version."""
        return text_in(mapping_in(self.object, "metadata"), "resourceVersion")


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """One page of a collection's objects, and the resource version for a watch after this list."""

    objects: Sequence[Mapping[str, Any]]
    version: str


class KubeClient:
    """A client of one API server. Call all methods, including ``close``, in the event loop of ``connect``."""

    def __init__(self, library: "Library") -> None:
        self._library = library

    @classmethod
    async def connect(cls, kubeconfig: Path | None = None) -> Self:
        """Read the server from ``kubeconfig``, else env KUBECONFIG or ``~/.kube/config``, else the service account.

        This method sends no request: an unreachable server causes an error at the first request. Raises
        KubeConfigError.
        """
        return cls(await Library.load(kubeconfig))

    @property
    def server(self) -> str:
        """The server's URL, for logs."""
        return self._library.host

    async def connection(self) -> Connection:
        """Return the server's address and this client's credentials with current tokens; raise KubeConfigError."""
        return await self._library.connection()

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Sequence[tuple[str, str]] = (),
        body: object = None,
        content_type: str = "application/json",
        timeout_s: float = 10.0,
    ) -> dict[str, Any]:
        """Send one request and return the answer; ``path`` begins with ``/api``. Raises KubeError for any failure."""
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=min(CONNECT_TIMEOUT_S, timeout_s))
        try:
            response = await self._library.send(
                method, path, query=query, body=body, content_type=content_type, timeout=timeout
            )
            async with response:
                text = await response.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise _not_reached(error, timeout_s) from error
        if response.status >= 400:
            raise _refusal(response.status, response.headers, text)
        return _document(text)

    async def watch(
        self,
        path: str,
        *,
        query: Sequence[tuple[str, str]] = (),
        timeout_s: float = WATCH_TIMEOUT_S,
        inactivity_s: float = WATCH_INACTIVITY_S,
    ) -> AsyncGenerator[WatchEvent, None]:
        """Yield the events of a collection after the ``resourceVersion`` in ``query``.

        The generator returns when the server ends the watch after ``timeout_s``. The generator raises KubeError for a
        failure and after ``inactivity_s`` without data. The error's ``expired`` is true if the version is no longer
        available. Close the generator (``contextlib.aclosing``) to stop early.
        """
        asked = [*query, ("watch", "true"), ("allowWatchBookmarks", "true"), ("timeoutSeconds", str(round(timeout_s)))]
        patience = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
        try:
            async with asyncio.timeout(inactivity_s):
                response = await self._library.send("GET", path, query=asked, timeout=patience)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise _not_reached(error, inactivity_s) from error
        try:
            if response.status >= 400:
                async with asyncio.timeout(inactivity_s):
                    raise _refusal(response.status, response.headers, await response.read())
            lines = _Lines()
            while True:
                async with asyncio.timeout(inactivity_s):
                    piece = await response.content.readany()
                if not piece:
                    break
                for line in lines.split(piece):
                    yield _event(line)
            if lines.unfinished:
                raise KubeError(0, "the watch ended in the middle of an event")
        except TimeoutError as error:
            raise KubeError(0, "the watch sent no data and did not end in time") from error
        except (aiohttp.ClientError, OSError) as error:
            raise _not_reached(error, inactivity_s) from error
        finally:
            # Close the connection instead of its reuse: further data of the watch may still arrive on it.
            response.close()

    async def close(self) -> None:
        """End every request and watch, and close the connections."""
        await self._library.close()


async def pages(client: KubeClient, path: str, *, query: Sequence[tuple[str, str]] = ()) -> AsyncGenerator[Page, None]:
    """Yield a collection page by page. Raises KubeError for a failure or an answer that is not a Kubernetes list."""
    rest = ""
    while True:
        asked = [*query, ("limit", str(_PAGE)), *([("continue", rest)] if rest else [])]
        answer = await client.request("GET", path, query=asked, timeout_s=_LIST_TIMEOUT_S)
        metadata = mapping_in(answer, "metadata")
        version, rest = text_in(metadata, "resourceVersion"), text_in(metadata, "continue")
        if not version:
            raise KubeError(0, "the list has no resourceVersion; is this a Kubernetes API?")
        yield Page(objects=mappings_in(answer, "items"), version=version)
        if not rest:
            return


class _Lines:
    """Splits a watch's data into lines with one event each. A line may have several MB and arrive in many pieces."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    @property
    def unfinished(self) -> bool:
        return any(piece.strip() for piece in self._pieces)

    def split(self, piece: bytes) -> list[bytes]:
        """Add ``piece`` to the data and return all lines that are now complete."""
        first, newline, rest = piece.partition(b"\n")
        self._pieces.append(first)
        if not newline:
            return []
        *whole, last = rest.split(b"\n")
        lines = [b"".join(self._pieces), *whole]
        self._pieces = [last]
        return [line for line in lines if line.strip()]


def _document(text: bytes) -> dict[str, Any]:
    """Parse a JSON object; raise KubeError for any other text."""
    try:
        document = json.loads(text)
    except ValueError as error:
        raise KubeError(0, f"the answer is not JSON: {clipped(text)}") from error
    if not isinstance(document, dict):
        raise KubeError(0, f"the answer is not a JSON object: {clipped(text)}")
    return document


def _event(line: bytes) -> WatchEvent:
    """Parse one event; raise KubeError for an ERROR event."""
    document = _document(line)
    kind, value = document.get("type"), document.get("object")
    if not isinstance(kind, str) or not isinstance(value, dict):
        raise KubeError(0, f"the watch sent an invalid event: {clipped(line)}")
    if kind == "ERROR":
        _raise_status(value)
    return WatchEvent(kind, value)


def _raise_status(status: Mapping[str, Any]) -> NoReturn:
    """Raise the KubeError for a Status object in a watch."""
    code = status.get("code")
    raise KubeError(
        code if isinstance(code, int) else 500,
        clipped(str(status.get("message", "the watch failed"))),
        reason=str(status.get("reason", "")),
    )


def _refusal(status: int, headers: Mapping[str, str], text: bytes) -> KubeError:
    """Return the error for an answer, with the message of its Status object or with its text."""
    reason = ""
    try:
        document = _document(text)
        message, reason = str(document.get("message", "")), str(document.get("reason", ""))
    except KubeError:
        not_served = text.strip() == _NOT_SERVED
        message = (
            "the API server does not serve this kind; is its CRD installed?"
            if not_served
            else text.decode(errors="replace")
        )
    wait = headers.get("Retry-After", "")
    return KubeError(
        status,
        clipped(message or reason or "no message"),
        reason=reason,
        retry_after_s=float(wait) if wait.isdecimal() else None,
    )


def _not_reached(error: Exception, timeout_s: float) -> KubeError:
    if isinstance(error, TimeoutError):
        return KubeError(0, f"the API server did not answer within {timeout_s:g} s")
    return KubeError(0, f"the API server cannot be reached: {clipped(str(error) or repr(error))}")
