"""The dashboard's HTTP routes: the page at ``/``, its files, and the stream of snapshots at ``/events``.

The router reads the files once, at its start. The Content-Security-Policy prevents a browser from loading or running
other files. A malicious name of a pool or member therefore does no harm, even if the page has a fault. Links are
relative, so the page works behind ``kubectl port-forward`` and below another path, such as behind the API server's
proxy.
"""

import asyncio
import hashlib
from collections.abc import Sequence
from importlib.resources import files
from typing import Final

from aiohttp import web

from dualmap_extproc.telemetry.dashboard.feed import EVERY_S, Feed, TooManyWatchers, Watcher
from dualmap_extproc.telemetry.dashboard.snapshot import SnapshotInputs, Snapshots

_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_PAGE: Final = "index.html"
_HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_WRITE_TIMEOUT_S: Final = 30.0
"""The router disconnects a page that does not read for this time."""


class Dashboard:
    """The dashboard of one router. ``http_status`` adds the dashboard's ``routes`` to the application."""

    def __init__(self, source: SnapshotInputs, *, every_s: float = EVERY_S) -> None:
        self._feed = Feed(Snapshots(source), every_s=every_s)
        self._files = _read_files()

    def routes(self) -> Sequence[web.RouteDef]:
        """Return the paths: ``/``, ``/dashboard/FILE`` and ``/events``."""
        return [
            web.get("/", self._get_file),
            web.get("/dashboard/{name}", self._get_file),
            web.get("/events", self._get_events, allow_head=False),
        ]

    def close(self) -> None:
        """End the streams of snapshots, so that the shutdown does not wait for open pages."""
        self._feed.close()

    async def _get_file(self, request: web.Request) -> web.Response:
        file = self._files.get(request.match_info.get("name", _PAGE))
        if file is None:
            raise web.HTTPNotFound
        body, content_type, tag = file
        # Browsers must revalidate files for each request, so that a page never uses files of another version.
        headers = {**_HEADERS, "Cache-Control": "no-cache", "ETag": f'"{tag}"', "Content-Type": content_type}
        if any(each.value == tag for each in request.if_none_match or ()):
            return web.Response(status=304, headers=headers)
        return web.Response(body=body, headers=headers)

    async def _get_events(self, request: web.Request) -> web.StreamResponse:
        """Send snapshots of the pool ``?pool=NAMESPACE/NAME`` (default: the first pool), until one side ends."""
        headers = {**_HEADERS, "Cache-Control": "no-store"}
        try:
            with self._feed.watching(request.query.get("pool", "")) as watcher:
                # Without the header X-Accel-Buffering, nginx would buffer the events.
                headers |= {"Content-Type": "text/event-stream", "X-Accel-Buffering": "no"}
                response = web.StreamResponse(headers=headers)
                await response.prepare(request)
                await _stream(watcher, request, response)
                return response
        except TooManyWatchers:
            text = "too many look at this dashboard already; try again later\n"
            return web.Response(status=503, text=text, headers={**headers, "Retry-After": "10"})


async def _stream(watcher: Watcher, request: web.Request, response: web.StreamResponse) -> None:
    """Write snapshots until the watcher ends or the page stops reading."""
    while (snapshot := await watcher.next()) is not None:
        try:
            async with asyncio.timeout(_WRITE_TIMEOUT_S):
                await response.write(b"data: " + snapshot + b"\n\n")
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
            return
        except ConnectionError:  # The page was closed.
            return


def _read_files() -> dict[str, tuple[bytes, str, str]]:
    """Return body, content type and tag of each file under ``static``, by name."""
    found = {}
    for each in (files(__package__) / "static").iterdir():
        content_type = _TYPES.get(each.name[each.name.rfind(".") :])
        if content_type is not None:
            body = each.read_bytes()
            found[each.name] = (body, content_type, hashlib.sha256(body).hexdigest()[:16])
    return found
