"""The router's load gauges, read at a steady pace while the replay runs.

They are the pending prefill tokens of each endpoint as the router believes them (CONTRACT, metrics): what the paper
measures the imbalance of (equation 1).
"""

import asyncio
import re
from dataclasses import dataclass
from typing import Final

import aiohttp

GAUGE: Final = "dualmap_endpoint_pending_prefill_tokens"
_SAMPLE = re.compile(rf"^{GAUGE}\{{[^}}]*\}} (\S+)$", re.MULTILINE)
_REQUEST_TIMEOUT_S: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSample:
    """Pending prefill tokens of every endpoint at one moment."""

    pending_tokens: tuple[float, ...]


def read_pending(metrics: str, *, endpoints: int) -> LoadSample:
    """Return the gauges of a metrics page; an endpoint without one has nothing pending."""
    values = [float(value) for value in _SAMPLE.findall(metrics)]
    return LoadSample(pending_tokens=tuple(values + [0.0] * (endpoints - len(values))))


async def sample_until_cancelled(metrics_url: str, *, endpoints: int, every_s: float, into: list[LoadSample]) -> None:
    """Append a sample every ``every_s`` seconds. A scrape that fails is left out: the replay matters more."""
    timeout = aiohttp.ClientTimeout(total=_REQUEST_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        while True:
            await asyncio.sleep(every_s)
            try:
                async with session.get(metrics_url) as response:
                    into.append(read_pending(await response.text(), endpoints=endpoints))
            except (TimeoutError, aiohttp.ClientError):
                continue
