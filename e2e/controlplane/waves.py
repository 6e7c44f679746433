"""A load profile for a pool with an autoscaler: first high load for three instances, then low load.

The engines break their streams at SIGTERM, so only a drain lets the streams complete. All three instances have streams
when the autoscaler removes two instances.
"""

from dataclasses import dataclass
from typing import Any

from controlplane.history import Shrink
from controlplane.product import Product, pool_manifest
from harness.traffic import Exchange, Traffic, tally

# A quarter of the preset's speed, so that few clients keep an instance busy with little CPU time.
SPEED = 0.25
_FLOOD_TOKENS = 1000
_PEAK = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Wave:
    """The requests of a wave with their responses, and the scale-downs of the pool."""

    exchanges: list[Exchange]
    shrinks: list[Shrink]

    def say(self, scaler: str) -> None:
        """Print the numbers; ``pytest -rP`` shows them."""
        steps = ", ".join(f"{each.before} -> {each.after}" for each in self.shrinks)
        print(f"{scaler}: 1 -> {_PEAK}, then {steps} under load: {dict(tally(self.exchanges))}")


def pool(namespace: str) -> dict[str, Any]:
    """Return the pool for waves: slow engines that break their streams at SIGTERM.

    Only the arrival rate scales the pool, even on a busy machine. The SLO is long, because a missed SLO would prevent a
    scale-down for hours. The queue is large, because requests wait while instances start.
    """
    return pool_manifest(
        "qwen",
        namespace,
        replicas=1,
        speed=SPEED,
        abrupt=True,
        **spec(),
    )


def spec() -> dict[str, Any]:
    """Return the spec of a pool for waves: SLO and queue, and engines of this ``SPEED``."""
    return {
        "engine": {"type": "TensorRTLLM", "prefillTokensPerSecond": 1500},
        "slo": {"ttft": "5m"},
        "routing": {"queue": {"maxWait": "5m"}},
    }


def flood(product: Product) -> Traffic:
    """Return clients that each send a new prompt every 3 s: a third more load than one instance can serve."""
    return product.traffic(streams=5, plain=1, tokens=40, prompt=new_prompt)


async def ride(product: Product) -> Wave:
    """Let the pool grow to three instances under high load, then shrink to one instance under a few streams."""
    surge, ebb = flood(product), product.traffic(streams=6, plain=1, tokens=40)
    async with product.recording() as history, ebb.running():
        async with surge.running():
            await product.until_active(_PEAK)
        await ebb.streaming(4)
        await product.until_active(1, timeout_s=240.0)
        await ebb.flowing(10)
    return Wave(exchanges=[*surge.exchanges, *ebb.exchanges], shrinks=history.shrinks())


def new_prompt(number: int) -> str:
    """Return a new prompt that no instance caches."""
    # A token is about four characters.
    return f"{number:08d} " * (_FLOOD_TOKENS * 4 // 9)
