"""A router of many simulated instances: the real picker under load, and its dashboard.

Tests use this module to simulate more instances than one machine can run. Each simulated instance prefills its prompts
one after the other at its speed and then answers, without network traffic.
"""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from dualmap.pools.pool import Pool
from dualmap.requests import Usage
from dualmap_extproc.autoscaling.demand import Demand
from dualmap_extproc.autoscaling.pool_demand import PoolDemand
from dualmap_extproc.errors import Refused
from dualmap_extproc.request.observations import FanOut
from dualmap_extproc.request.picked import AnswerLater, Picked
from dualmap_extproc.request.picker import Picker
from dualmap_extproc.settings import Limits
from dualmap_extproc.telemetry.dashboard.histories import Histories
from dualmap_extproc.telemetry.dashboard.routes import Dashboard
from dualmap_extproc.telemetry.dashboard.snapshot import SnapshotInputs
from dualmap_extproc.telemetry.http_status import StatusServer
from dualmap_extproc.telemetry.metrics import Metrics

_DECODE_S = (0.5, 4.0)
_PREFIXES = 60
_TAIL_CHARACTERS = 4000


class Fleet:
    """The router of several pools with simulated instances; ``served`` sets the dashboard's ``url``."""

    def __init__(self, pools: Sequence[Pool], *, seed: int = 1, every_s: float = 1.0) -> None:
        self.pools = tuple(pools)
        self.url = ""
        self.speeds: dict[str, float] = {}
        """Prefill tokens per second by instance, for the instances with another speed than their pool's."""
        self._random = random.Random(seed)
        self._every_s = every_s
        self._clock = asyncio.get_running_loop().time
        self._demand = Demand()
        self.metrics = Metrics(version="0.0", replica_id="router-0")
        self.histories = Histories()
        observations = FanOut()
        for subscriber in (self.metrics, self._demand, self.histories):
            subscriber.subscribe(observations)
        self.picker = Picker(Limits(), observations.report, id_prefix="fleet")
        self._free_s: dict[str, float] = {}
        self._cached: dict[str, set[int]] = {}
        self.adopt(self.pools)

    def adopt(self, pools: Sequence[Pool]) -> None:
        """Replace the pools."""
        self.pools = tuple(pools)
        self.metrics.set_pools(self.pools)
        self._demand.set_pools(self.pools)
        self.picker.set_pools(self._clock(), self.pools)

    @asynccontextmanager
    async def served(self) -> AsyncIterator[str]:
        """Serve the dashboard and the rest of the metrics port within the context."""
        source = SnapshotInputs(
            router="router-0",
            version="0.0",
            pools=lambda: self.picker.pools,
            statuses=self.picker.statuses,
            demand=PoolDemand(self._demand, self.picker.statuses, self.picker.pool, replicated=False).total,
            histories=self.histories,
            clock=time.time,
        )
        dashboard = Dashboard(source, every_s=self._every_s)
        server = StatusServer(
            router="router-0",
            statuses=self.picker.statuses,
            signals=self._demand.signals,
            metrics=self.metrics,
            dashboard=dashboard,
        )
        self.url = f"http://127.0.0.1:{await server.start('127.0.0.1', 0)}/"
        try:
            yield self.url
        finally:
            await server.close()

    async def load(self, *, per_second: float, prefix_tokens: int = 3000) -> None:
        """Send requests to the pools, one pool after the other, until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                for pool in self.pools:
                    self._send(group, pool, prefix_tokens)
                self.picker.on_deadline(self._clock())
                await asyncio.sleep(self._random.expovariate(per_second))

    def _send(self, group: asyncio.TaskGroup, pool: Pool, prefix_tokens: int) -> None:
        # A few prefixes are frequent, many are rare.
        prefix = min(int(self._random.paretovariate(0.9)), _PREFIXES)
        prompt = f"{pool.id} prefix {prefix} " * (prefix_tokens * 4 // 20)
        tail = self._random.randbytes(self._random.randrange(_TAIL_CHARACTERS // 2)).hex()
        body = {"model": pool.model.name, "stream": True, "messages": [{"role": "user", "content": prompt + tail}]}
        now = self._clock()

        def go(picked: Picked | Refused) -> None:
            if isinstance(picked, Picked):
                group.create_task(self._serve(pool, picked, prefix, len(prompt) // 4, len(tail) // 4))

        picked = self.picker.pick(now, json.dumps(body).encode(), None, now, headers={}, resume=go)
        if not isinstance(picked, AnswerLater):
            go(picked)

    async def _serve(self, pool: Pool, picked: Picked, prefix: int, prefix_tokens: int, tail_tokens: int) -> None:
        endpoint = picked.destination.partition(",")[0]
        cached = self._cached.setdefault(endpoint, set())
        hit = prefix_tokens if prefix in cached else 0
        cached.add(prefix)
        speed = self.speeds.get(endpoint, pool.engine.prefill_tokens_per_second)
        begins_s = max(self._clock(), self._free_s.get(endpoint, 0.0))
        self._free_s[endpoint] = begins_s + (prefix_tokens - hit + tail_tokens) / speed
        await asyncio.sleep(self._free_s[endpoint] - self._clock())
        self.picker.first_token(self._clock(), picked.request_id)
        await asyncio.sleep(self._random.uniform(*_DECODE_S))
        usage = Usage(prompt_tokens=prefix_tokens + tail_tokens, completion_tokens=100, cached_tokens=hit)
        self.picker.finished(self._clock(), picked.request_id, usage)
