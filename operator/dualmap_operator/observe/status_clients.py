"""HTTP clients for the status of routers and engines: requests in flight (for drains) and traffic totals.

``gather`` calls the clients; ``decide.drain`` evaluates the answers. Every request has bounded time and memory and
never raises. A router or engine with a missing or invalid answer counts as silent.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import aiohttp
from yarl import URL

from dualmap.engines.profile import DIALECTS, read_metrics
from dualmap.objects.pods import mapping_in, mappings_in, text_in
from dualmap_edge.http_answers import AnswerTooLarge, read_answer
from dualmap_operator.decide.observed import EndpointReport, RouterReport, TokenizerReport

_TIMEOUT_S: Final = 2.0
_LARGEST_BYTES: Final = 4 * 1024 * 1024
"""An engine's metrics response grows with its histograms. A router's answer has about 120 bytes for each endpoint."""
_AT_A_TIME: Final = 32
# The bounds of what a condition may quote of a router's answer.
_PROBLEM_CHARACTERS: Final = 300
_DIFFERING_MAX: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterAddress:
    """A router's metrics port; ``ready`` is whether the router receives requests."""

    host: str
    port: int
    ready: bool = True


class _HttpClient:
    """An HTTP client for small GET requests. Construct the client in a running event loop."""

    def __init__(self) -> None:
        # Each request opens a new connection, because another pod may get the same address. Answers are not
        # decompressed, because the decompressed size has no limit.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            headers={"Accept-Encoding": "identity"},
            auto_decompress=False,
        )
        self._turns = asyncio.Semaphore(_AT_A_TIME)

    async def get(self, host: str, port: int, path: str, *, timeout_s: float) -> tuple[int, bytes] | None:
        """Return the HTTP status and body; None if the answer is missing, late, incomplete or too large."""
        async with self._turns:
            try:
                async with asyncio.timeout(timeout_s):
                    return await self._get(URL.build(scheme="http", host=host, port=port, path=path))
            except (aiohttp.ClientError, OSError, ValueError):
                # OSError includes TimeoutError; an invalid host raises ValueError.
                return None

    async def _get(self, url: URL) -> tuple[int, bytes] | None:
        async with self._session.get(url, allow_redirects=False) as response:
            try:
                return response.status, await read_answer(response, max_bytes=_LARGEST_BYTES)
            except AnswerTooLarge:
                return None

    async def close(self) -> None:
        await self._session.close()


class RouterClient:
    """Requests the status of a pool from routers. Construct the client in a running event loop, and close it."""

    def __init__(self) -> None:
        self._http = _HttpClient()

    async def reports(
        self, pool_id: str, routers: Sequence[RouterAddress], *, timeout_s: float = _TIMEOUT_S
    ) -> tuple[tuple[RouterReport, Mapping[str, Any] | None], ...]:
        """Return each router's report on ``pool_id`` and its traffic totals (None if unknown), in the routers' order.

        A report's ``router`` is ``host:port``, also for a silent router.
        """
        return tuple(await asyncio.gather(*(self._report(pool_id, router, timeout_s) for router in routers)))

    async def close(self) -> None:
        """Close open connections."""
        await self._http.close()

    async def _report(
        self, pool_id: str, router: RouterAddress, timeout_s: float
    ) -> tuple[RouterReport, Mapping[str, Any] | None]:
        name = f"[{router.host}]:{router.port}" if ":" in router.host else f"{router.host}:{router.port}"
        silent = RouterReport(router=name, ready=router.ready, answered=False)
        answer = await self._http.get(router.host, router.port, f"/pools/{pool_id}", timeout_s=timeout_s)
        if answer is None:
            return silent, None
        status, body = answer
        document = _object(body)
        if document is None:
            return silent, None
        if status == 404 and text_in(document, "router"):
            return RouterReport(router=name, ready=router.ready), None
        if status != 200:
            return silent, None
        version, endpoints = _count(document.get("ring_version")), _endpoints(document.get("endpoints"))
        if version is None or endpoints is None:
            return silent, None
        report = RouterReport(
            router=name,
            ready=router.ready,
            ring_version=version,
            endpoints=endpoints,
            tokenizer=_tokenizer(mapping_in(document, "tokenizer")),
            kv_store_problem=_kv_store_problem(mapping_in(document, "kv_store")),
        )
        return report, mapping_in(document, "traffic") or None


class EngineClient:
    """Requests the number of requests from engines. Construct the client in a running event loop, and close it."""

    def __init__(self) -> None:
        self._http = _HttpClient()

    async def requests(self, engine_type: str, address: str, port: int, *, timeout_s: float = _TIMEOUT_S) -> int | None:
        """Return the number of running and waiting requests from the engine's metrics; None if they cannot be read.

        Engines of type Generic have no known metrics.
        """
        dialect = DIALECTS.get(engine_type)
        if dialect is None:
            return None
        answer = await self._http.get(address, port, dialect.path, timeout_s=timeout_s)
        if answer is None or answer[0] != 200:
            return None
        profile = read_metrics(engine_type, answer[1])
        return None if profile.running is None or profile.waiting is None else profile.running + profile.waiting

    async def close(self) -> None:
        """Close open connections."""
        await self._http.close()


def _object(body: bytes) -> Mapping[str, Any] | None:
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, Mapping) else None


def _endpoints(value: object) -> dict[str, EndpointReport] | None:
    """Return each endpoint's report by member id; None if any report is invalid, because a drain may depend on it."""
    if not isinstance(value, list):
        return None
    reports: dict[str, EndpointReport] = {}
    for each in value:
        if not isinstance(each, Mapping) or not isinstance(each.get("id"), str):
            return None
        in_flight, held = _count(each.get("in_flight")), _count(each.get("held"))
        if in_flight is None or held is None:
            return None
        reports[each["id"]] = EndpointReport(in_flight=in_flight, held=held, state=text_in(each, "state"))
    return reports


def _tokenizer(value: Mapping[str, Any]) -> TokenizerReport:
    """Return what a router says about token ids; an earlier router says nothing."""
    differing = (
        f"{text_in(each, 'model')!r} ({text_in(each, 'api')}{' with tools' if each.get('tools') is True else ''})"
        for each in mappings_in(value, "distrusted")
    )
    return TokenizerReport(
        problem=text_in(value, "reason")[:_PROBLEM_CHARACTERS],
        differing=tuple(each[:_PROBLEM_CHARACTERS] for each in islice(differing, _DIFFERING_MAX)),
    )


def _kv_store_problem(value: Mapping[str, Any]) -> str:
    """Return why a router leaves the pool's KV store alone; empty if it asks the store, or says nothing of it."""
    if text_in(value, "state") != "LeftAlone":
        return ""
    return text_in(value, "reason")[:_PROBLEM_CHARACTERS] or "no reason"


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
