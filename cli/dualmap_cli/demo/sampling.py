"""Samples the routers' load gauges at a steady interval while the replay runs.

The gauges are each endpoint's pending prefill tokens, in flight or queued, as estimated by the routers
(docs/metrics.md). The DualMap paper computes imbalance from these tokens (equation 1).
"""

import asyncio
import re
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import aiohttp

GAUGES: Final = ("dualmap_endpoint_pending_prefill_tokens", "dualmap_endpoint_held_prefill_tokens")
_SAMPLE = re.compile(rf'^(?:{"|".join(GAUGES)})\{{[^}}]*endpoint="([^"]*)"[^}}]*\}} (\S+)$', re.MULTILINE)
_IN_FLIGHT = re.compile(r"^dualmap_endpoint_in_flight_requests\{[^}]*\} (\S+)$", re.MULTILINE)
_REQUEST_TIMEOUT_S: Final = 2.0
_IDLE_TRIES: Final = 50
_IDLE_EVERY_S: Final = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSample:
    """Pending prefill tokens of every endpoint at one moment."""

    pending_tokens: tuple[float, ...]


def read_pending(pages: Sequence[str], *, endpoints: int) -> LoadSample:
    """Return each endpoint's gauges, summed over the routers' metrics pages. An endpoint without a gauge counts 0."""
    pending: defaultdict[str, float] = defaultdict(float)
    for page in pages:
        for endpoint, value in _SAMPLE.findall(page):
            pending[endpoint] += float(value)
    values = tuple(pending.values())
    return LoadSample(pending_tokens=values + (0.0,) * (endpoints - len(values)))


async def metrics_pages(metrics_urls: Sequence[str]) -> tuple[str, ...]:
    """Return the metrics pages of the routers that answer."""
    pages = []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_REQUEST_TIMEOUT_S)) as session:
        for url in metrics_urls:
            with suppress(TimeoutError, aiohttp.ClientError):
                pages.append(await _page(session, url))
    return tuple(pages)


async def wait_until_idle(metrics_urls: Sequence[str]) -> None:
    """Wait until the routers know the ends of all requests, which Envoy reports late; for a few seconds at most."""
    for _ in range(_IDLE_TRIES):
        pages = await metrics_pages(metrics_urls)
        if not any(float(value) for page in pages for value in _IN_FLIGHT.findall(page)):
            return
        await asyncio.sleep(_IDLE_EVERY_S)


async def sample_until_cancelled(
    metrics_urls: Sequence[str], *, endpoints: int, every_s: float, into: list[LoadSample]
) -> None:
    """Append a sample every ``every_s`` seconds. A failed scrape is skipped, because the replay must not stop."""
    timeout = aiohttp.ClientTimeout(total=_REQUEST_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        while True:
            await asyncio.sleep(every_s)
            try:
                pages = [await _page(session, url) for url in metrics_urls]
            except (TimeoutError, aiohttp.ClientError):
                continue
            into.append(read_pending(pages, endpoints=endpoints))


async def _page(session: aiohttp.ClientSession, url: str) -> str:
    async with session.get(url) as response:
        return await response.text()
