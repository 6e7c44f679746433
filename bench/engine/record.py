"""Sends the requests of ``scenarios.py`` to a real engine, group by group, and returns the recording.

Before every group, one request of a fixed kind, the *probe*, is sent alone. The probes' times show the machine's noise.
"""

import asyncio
import os
import platform
import re
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from bench.engine.client import Client
from bench.engine.recording import Group, Recording
from bench.engine.scenarios import Ask, planned

PROBE_TOKENS = 512
PROBES = 5
FIRST_PROBE = 1_000_000
"""Number of the first probe's text; the texts of the scenarios have lower numbers."""
PAUSE_S = 0.05
"""Seconds between groups, because an engine still finishes its step after the last token."""


async def record(url: str, *, rounds: int, step_tokens: int, options: str, say: Callable[[str], None]) -> Recording:
    """Send all groups to the engine at ``url`` and return the recording. Raises EngineError."""
    async with Client(url) as client:
        probe = _Probe(client)
        speed = PROBE_TOKENS / median([await probe.ttft_s() for _ in range(PROBES)])
        say(f"{speed:.0f} tokens/s")
        groups = []
        before = _load()
        for group in planned(rounds, tokens_per_s=speed):
            probe_s, load = await probe.ttft_s(), round(os.getloadavg()[0], 2)
            began_s = time.monotonic()
            seen = [
                each
                for number, wave in enumerate(group.waves)
                for each in await client.wave(wave, number=number, began_s=began_s)
            ]
            groups.append(
                Group(scenario=group.scenario, round=group.round, probe_s=probe_s, load=load, requests=tuple(seen))
            )
            say(f"round {group.round}: {group.scenario}, {len(seen)} requests")
            await asyncio.sleep(PAUSE_S)
        return Recording(
            engine={**await _engine(client), "step_tokens": step_tokens, "options": options},
            machine={**_machine(), "load_before": before, "load_after": _load()},
            groups=tuple(groups),
        )


class _Probe:
    """Requests of one length without a common prefix, sent alone."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._sent = 0

    async def ttft_s(self) -> float:
        self._sent += 1
        ask = Ask(pieces=((FIRST_PROBE + self._sent, PROBE_TOKENS),))
        (seen,) = await self._client.wave((ask,), number=0, began_s=time.monotonic())
        return seen.ttft_s


async def _engine(client: Client) -> dict[str, str | int]:
    """Return the engine's version, model and cache size. Only one of the engine's metrics contains the cache size."""
    version, models = await client.get("/version"), await client.get("/v1/models")
    cache = dict(re.findall(r'(\w+)="([^"]*)"', await client.line("/metrics", "vllm:cache_config_info{")))
    block_tokens, blocks = int(cache["block_size"]), int(cache["num_gpu_blocks"])
    return {
        "version": f"vLLM {version['version']}",
        "model": models["data"][0]["id"],
        "block_tokens": block_tokens,
        "kv_tokens": block_tokens * blocks,
    }


def _machine() -> dict[str, str | int]:
    names = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    clocks = re.findall(r"^cpu MHz\s*: (.*)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    return {
        "cpu": names[0] if names else platform.machine(),
        "mhz": ", ".join(clocks),
        "cores": os.cpu_count() or 0,
        "at": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    }


def _load() -> str:
    return ", ".join(f"{each:.1f}" for each in os.getloadavg())
