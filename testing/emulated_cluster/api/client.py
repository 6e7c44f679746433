"""A small Kubernetes API client for the emulated components and the tests: JSON objects, no generated models.

The client reads the kubeconfig files that ``control_plane/kubeconfigs.py`` writes. Callers retry.
"""

import asyncio
import base64
import json
import ssl
import tempfile
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import aiohttp

_GONE: Final = 410
# A watch sends one event per line, and a line with a large object has some megabytes.
_LONGEST_LINE: Final = 1 << 24
# Time for the TLS shutdown of an interrupted connection.
_INTERRUPTED_CLOSES_WITHIN_S: Final = 0.2


class ApiError(Exception):
    """A request failed. ``status`` is the HTTP status, or 0 if no response arrived."""

    def __init__(self, status: int, message: str) -> None:
        self.status = status
        self.message = message
        super().__init__(f"{status} {message}" if status else message)

    @property
    def expired(self) -> bool:
        """Whether the API server no longer has the watch's start version. The client must list again."""
        return self.status == _GONE


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """One line of a watch: ``type`` is ADDED, MODIFIED, DELETED or BOOKMARK."""

    type: str
    object: dict[str, Any]

    @property
    def version(self) -> str:
        """The resource version from which another watch can continue."""
        version: str = self.object["metadata"]["resourceVersion"]
        return version


class ApiClient:
    """A client of one API server as one user. The event loop that creates the client must also close it."""

    def __init__(self, server: str, *, tls: ssl.SSLContext | None = None, token: str | None = None) -> None:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._server = server
        self._interrupted = False
        # Each watch uses a connection, so the number of connections has no limit.
        connector = aiohttp.TCPConnector(ssl=tls if tls is not None else True, limit=0)
        self._session = aiohttp.ClientSession(connector=connector, headers=headers, read_bufsize=_LONGEST_LINE)

    @classmethod
    def from_kubeconfig(cls, path: Path) -> Self:
        """Return a client for the only user and the only server of a kubeconfig file in JSON."""
        document = json.loads(path.read_text())
        cluster = document["clusters"][0]["cluster"]
        user = document["users"][0]["user"]
        return cls(cluster["server"], tls=_tls(cluster, user), token=user.get("token"))

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
        """Send one request and return the JSON object of the response; raises ApiError."""
        try:
            async with self._session.request(
                method,
                self._server + path,
                params=query,
                data=None if body is None else json.dumps(body).encode(),
                headers={"Content-Type": content_type},
                timeout=aiohttp.ClientTimeout(total=timeout_s),
            ) as response:
                return _document(response.status, await response.read())
        except asyncio.CancelledError:
            self._interrupted = True
            raise
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            self._interrupted = True
            raise _unreachable(error) from error

    async def watch(
        self, path: str, *, query: Sequence[tuple[str, str]] = (), timeout_s: float = 45.0, inactivity_s: float = 55.0
    ) -> AsyncGenerator[WatchEvent, None]:
        """Yield the events of a collection after the ``resourceVersion`` in ``query``; raises ApiError.

        The server ends the watch after ``timeout_s``, and the generator then returns. A watch without data for
        ``inactivity_s`` counts as broken. To end the watch earlier, close the generator (``contextlib.aclosing``).
        """
        asked = [*query, ("watch", "true"), ("allowWatchBookmarks", "true"), ("timeoutSeconds", str(round(timeout_s)))]
        self._interrupted = True
        silence = aiohttp.ClientTimeout(total=None, sock_read=inactivity_s)
        try:
            async with self._session.get(self._server + path, params=asked, timeout=silence) as response:
                if response.status >= 400:
                    _document(response.status, await response.read())
                async for line in response.content:
                    yield _event(line)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise _unreachable(error) from error

    async def close(self) -> None:
        """End every request and watch, and close the connections."""
        await self._session.close()
        if self._interrupted:
            await asyncio.sleep(_INTERRUPTED_CLOSES_WITHIN_S)


def _tls(cluster: Mapping[str, str], user: Mapping[str, str]) -> ssl.SSLContext | None:
    """Return the TLS settings of a kubeconfig: the certificate authority, and the user's certificate if present."""
    if "certificate-authority-data" not in cluster:
        return None
    context = ssl.create_default_context(cadata=_decoded(cluster["certificate-authority-data"]).decode())
    if "client-certificate-data" in user:
        # The ssl module reads certificates from files only.
        with tempfile.TemporaryDirectory() as folder:
            certificate, key = Path(folder, "user.crt"), Path(folder, "user.key")
            certificate.write_bytes(_decoded(user["client-certificate-data"]))
            key.write_bytes(_decoded(user["client-key-data"]))
            context.load_cert_chain(certificate, key)
    return context


def _decoded(data: str) -> bytes:
    return base64.b64decode(data)


def _document(status: int, text: bytes) -> dict[str, Any]:
    """Return the JSON object of a response; raises ApiError for an error status or if the body is not a JSON object."""
    try:
        document = json.loads(text)
    except ValueError:
        document = None
    if status >= 400:
        message = document.get("message") if isinstance(document, dict) else None
        raise ApiError(status, str(message or text.decode(errors="replace").strip()))
    if not isinstance(document, dict):
        raise ApiError(0, f"the answer is not a JSON object: {text[:200]!r}")
    return document


def _event(line: bytes) -> WatchEvent:
    """Return the watch event in one line; raises ApiError for an event of type ERROR."""
    document = _document(0, line)
    if document["type"] == "ERROR":
        status = document["object"]
        raise ApiError(status.get("code", 500), str(status.get("message")))
    return WatchEvent(document["type"], document["object"])


def _unreachable(error: Exception) -> ApiError:
    return ApiError(0, f"the API server cannot be reached: {error or type(error).__name__}")
