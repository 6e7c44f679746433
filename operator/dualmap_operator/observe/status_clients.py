"""Asking routers and engines over HTTP what they have in flight: the drain's evidence, and the traffic they count.

``gather`` calls it in each look; ``drain`` judges the answers. Whatever a peer does, a question takes bounded time and
memory and never raises: who does not answer, or answers what cannot be read, has said nothing.
"""

import asyncio
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
from yarl import URL

from dualmap.objects.pods import mapping_in, text_in
from dualmap_operator.decide.observed import EndpointReport, RouterReport

_TIMEOUT_S: Final = 2.0
_LARGEST_BYTES: Final = 4 * 1024 * 1024
"""An engine's page grows with its histograms, a router's answer by some 120 bytes for each endpoint."""
_CHUNK_BYTES: Final = 64 * 1024
_AT_A_TIME: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterAddress:
    """Where a router's metrics port is; ``ready`` is whether requests are sent to this router."""

    host: str
    port: int
    ready: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class _EngineMetrics:
    """Where an engine says what it is running and has waiting (PROTOCOLS section 2)."""

    path: str
    running: str
    waiting: str


_ENGINE_METRICS: Final[Mapping[str, _EngineMetrics]] = {
    "vLLM": _EngineMetrics(path="/metrics", running="vllm:num_requests_running", waiting="vllm:num_requests_waiting"),
    "SGLang": _EngineMetrics(path="/metrics", running="sglang:num_running_reqs", waiting="sglang:num_queue_reqs"),
    "TensorRTLLM": _EngineMetrics(
        path="/prometheus/metrics", running="trtllm_num_requests_running", waiting="trtllm_num_requests_waiting"
    ),
}

# What follows a metric's name on its line: labels, whose quoted values may hold anything, then a value and perhaps a
# time. Nothing in it can match in two ways, so that a long line is read once.
_SAMPLE: Final = re.compile(
    rb"""[ \t]*+(?:\{(?:[^"}\n]++|"(?:[^"\\\n]|\\[^\n])*+")*+\})?[ \t]*+([^ \t\n]++)(?:[ \t]++-?[0-9]++)?[ \t\r]*+\n"""
)
_NAME_GOES_ON: Final = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_:")


class _Asker:
    """An HTTP client for small questions. To be made where an event loop runs."""

    def __init__(self) -> None:
        # Connections are not kept: the next life of an address must not be taken for this one. What is compressed
        # could be of any size, so nothing is unpacked.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            headers={"Accept-Encoding": "identity"},
            auto_decompress=False,
        )
        self._turns = asyncio.Semaphore(_AT_A_TIME)

    async def get(self, host: str, port: int, path: str, *, timeout_s: float) -> tuple[int, bytes] | None:
        """Return the answer's HTTP status and body; None for none, a late one, a cut one or too large a one."""
        async with self._turns:
            try:
                async with asyncio.timeout(timeout_s):
                    return await self._get(URL.build(scheme="http", host=host, port=port, path=path))
            except (aiohttp.ClientError, OSError, ValueError):
                # OSError includes TimeoutError; ValueError is what a host that cannot be one raises.
                return None

    async def _get(self, url: URL) -> tuple[int, bytes] | None:
        async with self._session.get(url, allow_redirects=False) as response:
            body = bytearray()
            async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
                body += chunk
                if len(body) > _LARGEST_BYTES:
                    return None
            return response.status, bytes(body)

    async def close(self) -> None:
        await self._session.close()


class RouterClient:
    """Asks routers for what they know of a pool. To be made where an event loop runs, and closed."""

    def __init__(self) -> None:
        self._asker = _Asker()

    async def reports(
        self, pool_id: str, routers: Sequence[RouterAddress], *, timeout_s: float = _TIMEOUT_S
    ) -> tuple[tuple[RouterReport, Mapping[str, Any] | None], ...]:
        """Return each router's report on ``namespace/name``, in their order, with its totals of traffic if it has any.

        A report's ``router`` is ``host:port``, which is known of those too that are not heard.
        """
        return tuple(await asyncio.gather(*(self._report(pool_id, router, timeout_s) for router in routers)))

    async def close(self) -> None:
        """End what is open."""
        await self._asker.close()

    async def _report(
        self, pool_id: str, router: RouterAddress, timeout_s: float
    ) -> tuple[RouterReport, Mapping[str, Any] | None]:
        name = f"[{router.host}]:{router.port}" if ":" in router.host else f"{router.host}:{router.port}"
        unheard = RouterReport(router=name, ready=router.ready, heard=False)
        answer = await self._asker.get(router.host, router.port, f"/pools/{pool_id}", timeout_s=timeout_s)
        if answer is None:
            return unheard, None
        status, body = answer
        document = _object(body)
        if document is None:
            return unheard, None
        if status == 404 and text_in(document, "router"):
            return RouterReport(router=name, ready=router.ready), None
        if status != 200:
            return unheard, None
        version, endpoints = _count(document.get("ring_version")), _endpoints(document.get("endpoints"))
        if version is None or endpoints is None:
            return unheard, None
        report = RouterReport(router=name, ready=router.ready, ring_version=version, endpoints=endpoints)
        return report, mapping_in(document, "traffic") or None


class EngineClient:
    """Asks engines how many requests they have. To be made where an event loop runs, and closed."""

    def __init__(self) -> None:
        self._asker = _Asker()

    async def requests(self, engine_type: str, address: str, port: int, *, timeout_s: float = _TIMEOUT_S) -> int | None:
        """Return how many requests run and wait in an engine, by its own metrics; None where these cannot be read.

        Engines of type Generic have no metrics that we know of.
        """
        metrics = _ENGINE_METRICS.get(engine_type)
        if metrics is None:
            return None
        answer = await self._asker.get(address, port, metrics.path, timeout_s=timeout_s)
        if answer is None or answer[0] != 200:
            return None
        running, waiting = (_sum(answer[1], name) for name in (metrics.running, metrics.waiting))
        return None if running is None or waiting is None else running + waiting

    async def close(self) -> None:
        """End what is open."""
        await self._asker.close()


def _object(body: bytes) -> Mapping[str, Any] | None:
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, Mapping) else None


def _endpoints(value: object) -> dict[str, EndpointReport] | None:
    """Return what is in flight by member id; None if any of it cannot be read, for it may be what a drain waits for."""
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


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _sum(page: bytes, name: str) -> int | None:
    """Return the sum of a metric's samples, whatever their labels, on a page of Prometheus' text format.

    None if there is none, or one that is no count. A page that does not end with its last line's end was cut.
    """
    if not page.endswith(b"\n"):
        return None
    start = b"\n" + name.encode()
    lines = b"\n" + page
    total, found, at = 0.0, False, lines.find(start)
    while at >= 0:
        rest = at + len(start)
        if lines[rest] not in _NAME_GOES_ON:
            value = _sample(lines, rest)
            if value is None:
                return None
            total, found = total + value, True
        at = lines.find(start, rest)
    return math.ceil(total) if found and total < math.inf else None


def _sample(lines: bytes, rest: int) -> float | None:
    match = _SAMPLE.match(lines, rest)
    try:
        value = float(match[1]) if match else math.nan
    except ValueError:
        return None
    return value if 0 <= value < math.inf else None
