"""The metrics an autoscaler uses: the router's own rule, or the requests in flight per instance.

A meter receives the routers' events and returns the desired instances, as a metric with a target of 1 per instance.
``loop`` calls it. ``dualmap.scaling.scaling`` is the rule, with the same input as in production.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from dualmap.pools.pool import Pool
from dualmap.receipt import Receipt
from dualmap.requests import FirstToken, PoolSnapshot
from dualmap.scaling.scaling import OtherRouter, Scaling


class Meter(Protocol):
    """The metric of one pool. ``router`` is a router's number; ``statuses`` are the current ones of all routers."""

    def adopt(self, pool: Pool) -> None:
        """Apply a new version of the pool."""

    def routed(self, now: float, router: int, receipt: Receipt) -> None:
        """Count a request that was sent to an instance."""

    def held(self, now: float, router: int) -> None:
        """Count a request that was queued."""

    def refused(self, now: float, router: int) -> None:
        """Count a request that was rejected."""

    def first_token(self, now: float, router: int, first_token: FirstToken) -> None:
        """Count a first token."""

    def sample(self, statuses: Sequence[PoolSnapshot]) -> None:
        """Sample the routers, once a second."""

    def desired_replicas(self, now: float, statuses: Sequence[PoolSnapshot]) -> float:
        """Return the desired instances, which the caller rounds up at each sync."""


class Scaler(Protocol):
    """The metric a pool is scaled on, as a value; None stands for a fleet that is not scaled."""

    def meter(self, pool: Pool, *, routers: int) -> Meter:
        """Return a new meter of the pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OnSlo:
    """Scales on ``dualmap_pool_desired_replicas``, summed over routers."""

    def meter(self, pool: Pool, *, routers: int) -> Meter:
        """Return a new meter of the pool."""
        return _Slo(pool, routers)


@dataclass(frozen=True, slots=True, kw_only=True)
class OnQueue:
    """Scales on the requests in flight, ``requests`` per instance, as is common with vLLM's own metrics.

    Requests queued in the routers count, because they would otherwise wait in the engines' queues. The mean over the
    seconds since the last sync counts, so that a short burst at a sync has little effect.
    """

    requests: float

    def meter(self, pool: Pool, *, routers: int) -> Meter:
        """Return a new meter of the pool."""
        return _Queue(self.requests)


class _Slo:
    def __init__(self, pool: Pool, routers: int) -> None:
        self._scalings = tuple(Scaling(pool) for _ in range(routers))
        # The last desired replicas of each router, as known to the others.
        self._desired = [0.0] * routers

    def adopt(self, pool: Pool) -> None:
        for scaling in self._scalings:
            scaling.adopt(pool)

    def routed(self, now: float, router: int, receipt: Receipt) -> None:
        cached = receipt.matched_tokens
        self._scalings[router].window.add(now, uncached_tokens=receipt.prompt_tokens - cached, cached_tokens=cached)

    def held(self, now: float, router: int) -> None:
        self._scalings[router].window.enqueue(now)

    def refused(self, now: float, router: int) -> None:
        self._scalings[router].window.reject(now)

    def first_token(self, now: float, router: int, first_token: FirstToken) -> None:
        self._scalings[router].window.first_token(now, within_slo=first_token.within_slo)

    def sample(self, statuses: Sequence[PoolSnapshot]) -> None:
        """The rule's input is updated at the sync."""

    def desired_replicas(self, now: float, statuses: Sequence[PoolSnapshot]) -> float:
        first_tokens = [scaling.window.first_tokens(now) for scaling in self._scalings]
        for number, (scaling, status) in enumerate(zip(self._scalings, statuses, strict=True)):
            others = tuple(
                OtherRouter(desired_replicas=desired, first_tokens=came)
                for other, (desired, came) in enumerate(zip(self._desired, first_tokens, strict=True))
                if other != number
            )
            self._desired[number] = scaling.signals(now, status, others=others).desired_replicas
        return sum(self._desired)


class _Queue:
    def __init__(self, requests: float) -> None:
        self._requests = requests
        self._samples: list[int] = []

    def adopt(self, pool: Pool) -> None:
        """Requests in flight are counted for any version of the pool."""

    def routed(self, now: float, router: int, receipt: Receipt) -> None:
        """Requests in flight are sampled, not counted one by one."""

    def held(self, now: float, router: int) -> None:
        """Queued requests are in the samples."""

    def refused(self, now: float, router: int) -> None:
        """A rejected request is not in flight."""

    def first_token(self, now: float, router: int, first_token: FirstToken) -> None:
        """A request is in flight until it ends."""

    def sample(self, statuses: Sequence[PoolSnapshot]) -> None:
        in_flight = sum(endpoint.in_flight for status in statuses for endpoint in status.endpoints)
        self._samples.append(in_flight + sum(status.held for status in statuses))

    def desired_replicas(self, now: float, statuses: Sequence[PoolSnapshot]) -> float:
        samples, self._samples = self._samples, []
        return sum(samples) / len(samples) / self._requests if samples else 0.0
