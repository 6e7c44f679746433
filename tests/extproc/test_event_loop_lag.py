"""Tests of the metric of the event loop's delay."""

import asyncio
import time

from prometheus_client import CollectorRegistry

from dualmap_extproc.telemetry.transport import TransportMetrics
from waiting import until

NAME = "dualmap_event_loop_lag_seconds"
# The first measurement is due after 0.1 s.
BLOCKED_S = 0.7


async def test_step_that_blocks_the_event_loop_is_measured():
    registry = CollectorRegistry()
    measuring = asyncio.create_task(TransportMetrics(registry).run())
    await asyncio.sleep(0)
    time.sleep(BLOCKED_S)  # noqa: ASYNC251  # the test blocks the event loop on purpose
    await until(lambda: registry.get_sample_value(f"{NAME}_count") > 0)
    measuring.cancel()

    assert registry.get_sample_value(f"{NAME}_bucket", {"le": "0.5"}) < registry.get_sample_value(f"{NAME}_count")
    assert registry.get_sample_value(f"{NAME}_sum") >= 0.5
