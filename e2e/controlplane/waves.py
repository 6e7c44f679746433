"""A wave of load on a pool with an autoscaler: first enough for three instances, then little, but never zero.

A drain must save the remaining streams: engines cut their streams at SIGTERM. When two of the three instances are
removed, all three have streams.
"""

from dataclasses import dataclass
from typing import Any

from controlplane.history import Shrink
from controlplane.product import Product, pool_manifest
from harness.traffic import Exchange, Traffic, tally

# A quarter of the preset's speed: few clients keep an instance busy, and the machine has little to do.
SPEED = 0.25
_FLOOD_TOKENS = 1000
_PEAK = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Wave:
    """The exchanges of a wave's requests, and the scale-downs of the pool."""

    exchanges: list[Exchange]
    shrinks: list[Shrink]

    def say(self, scaler: str) -> None:
        """Print the numbers; ``pytest -rP`` shows them."""
        steps = ", ".join(f"{each.before} -> {each.after}" for each in self.shrinks)
        print(f"{scaler}: 1 -> {_PEAK}, then {steps} under load: {dict(tally(self.exchanges))}")


def pool(namespace: str) -> dict[str, Any]:
    """Return the pool for waves: slow engines whose streams only a drain protects.

    Only arrivals scale it, even on a busy machine. Its limits are wide: a missed SLO would keep an instance for hours,
    and requests may wait while instances start.
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
    """Return the spec of a pool for waves: engines of this ``SPEED``, SLO and queue."""
    return {
        "engine": {"type": "TensorRTLLM", "prefillTokensPerSecond": 1500},
        "slo": {"ttft": "5m"},
        "routing": {"queue": {"maxWait": "5m"}},
    }


def flood(product: Product) -> Traffic:
    """Return clients with new prompts only, one every 3 s each: a third more than one instance can serve."""
    return product.traffic(streams=5, plain=1, tokens=40, prompt=new_prompt)


async def ride(product: Product) -> Wave:
    """Let the pool grow to three under a flood, then shrink to one while a few streams continue."""
    surge, ebb = flood(product), product.traffic(streams=6, plain=1, tokens=40)
    async with product.recording() as history, ebb.running():
        async with surge.running():
            await product.until_active(_PEAK)
        await ebb.streaming(4)
        await product.until_active(1, timeout_s=240.0)
        await ebb.flowing(10)
    return Wave(exchanges=[*surge.exchanges, *ebb.exchanges], shrinks=history.shrinks())


def new_prompt(number: int) -> str:
    """Return a new prompt, cached by no instance."""
    # A token is about four characters.
    return f"{number:08d} " * (_FLOOD_TOKENS * 4 // 9)
