"""Stops requests to a renderer that does not work for a time, so that they do not wait for it until their deadline."""

from dataclasses import dataclass
from typing import Final, NamedTuple

from dualmap.prompts.api import Api

FAILURES_MAX: Final = 3
"""After so many failures in a row, requests are routed by their bytes at once."""
RETRY_S: Final = 5.0
"""After this time, one request asks the renderer again."""


class RenderedRequests(NamedTuple):
    """The requests that a renderer either serves or does not: those of one pool, model and API."""

    pool: str
    model: str
    api: Api


@dataclass(slots=True)
class _Fault:
    failures: int = 0
    retry_s: float = 0.0
    reason: str = ""


class RendererFaults:
    """The failures in a row of all renderers. The number of its entries is that of the pools' models and APIs."""

    def __init__(self) -> None:
        self._faults: dict[RenderedRequests, _Fault] = {}

    def usable(self, now: float, requests: RenderedRequests) -> bool:
        """Return whether a request may ask the renderer now."""
        fault = self._faults.get(requests)
        if fault is None or fault.failures < FAILURES_MAX:
            return True
        if now < fault.retry_s:
            return False
        fault.retry_s = now + RETRY_S
        return True

    def failed(self, now: float, requests: RenderedRequests, reason: str) -> bool:
        """Count a failure; return whether the renderer becomes unusable."""
        fault = self._faults.setdefault(requests, _Fault())
        fault.failures += 1
        fault.reason = reason
        fault.retry_s = now + RETRY_S
        return fault.failures == FAILURES_MAX

    def answered(self, requests: RenderedRequests) -> bool:
        """Forget the failures after an answer; return whether the renderer was unusable."""
        fault = self._faults.pop(requests, None)
        return fault is not None and fault.failures >= FAILURES_MAX

    def reason(self, pool: str) -> str:
        """Return why a pool's renderer is unusable for some of its requests; empty if it is usable."""
        unusable = {each: fault for each, fault in self._faults.items() if fault.failures >= FAILURES_MAX}
        reasons = sorted(
            f"{each.model} ({each.api.name.lower()}): {fault.reason}"
            for each, fault in unusable.items()
            if each.pool == pool
        )
        return reasons[0] if reasons else ""

    def forget(self, pool: str) -> None:
        """Forget the failures of a pool's renderer."""
        self._faults = {each: fault for each, fault in self._faults.items() if each.pool != pool}
