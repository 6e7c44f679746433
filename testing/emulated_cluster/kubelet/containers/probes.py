"""A container's probes: their period, and their success and failure thresholds (core/v1 Probe).

``actions.py`` runs the checks. ``process_containers.py`` acts on the results that reach a threshold.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any, Self

from emulated_cluster.kubelet.containers.actions import ActionTarget, perform


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One probe from a container's spec. ``grace_s`` is the grace period of a restart after the probe's failure."""

    handler: Mapping[str, Any]
    initial_delay_s: float
    period_s: float
    timeout_s: float
    success_threshold: int
    failure_threshold: int
    grace_s: float | None

    @classmethod
    def read(cls, container: Mapping[str, Any], kind: str) -> Self | None:
        """Return the container's ``startupProbe``, ``livenessProbe`` or ``readinessProbe``, or None."""
        spec = container.get(kind)
        if spec is None:
            return None
        return cls(
            handler=spec,
            initial_delay_s=spec.get("initialDelaySeconds", 0),
            period_s=spec.get("periodSeconds", 10),
            timeout_s=spec.get("timeoutSeconds", 1),
            success_threshold=spec.get("successThreshold", 1),
            failure_threshold=spec.get("failureThreshold", 3),
            grace_s=spec.get("terminationGracePeriodSeconds"),
        )


class Tally:
    """Counts consecutive equal results. A verdict is a result that has reached the probe's threshold."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._last: bool | None = None
        self._alike = 0

    def add(self, success: bool) -> bool | None:
        """Count one result; return the verdict, or None below the threshold."""
        self._alike = self._alike + 1 if success is self._last else 1
        self._last = success
        needed = self._probe.success_threshold if success else self._probe.failure_threshold
        return success if self._alike >= needed else None


async def verdicts(probe: Probe, target: ActionTarget) -> AsyncGenerator[bool, None]:
    """Run the probe once per period and yield every verdict, also an unchanged verdict."""
    tally = Tally(probe)
    await asyncio.sleep(probe.initial_delay_s)
    while True:
        next_s = asyncio.get_running_loop().time() + probe.period_s
        verdict = tally.add(await perform(probe.handler, target, timeout_s=probe.timeout_s))
        if verdict is not None:
            yield verdict
        await asyncio.sleep(next_s - asyncio.get_running_loop().time())
