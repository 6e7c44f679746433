"""The metrics that an autoscaler uses: the router's own rule, or the requests in flight per instance.

A meter receives the routers' events and returns the desired instances, as a metric with a target of 1 per instance.
``loop`` calls the meter. The router's own rule is ``dualmap.scaling.scaling``, with the same input as in production.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from dualmap.pools.pool import Pool
from dualmap.receipt import Receipt
from dualmap.requests import FirstToken, PoolSnapshot
from dualmap.scaling.scaling import OtherRouter, Scaling


class Meter(Protocol):
    """The metric of one pool. ``router`` is a router's number; ``statuses`` has each router's share of the demand."""

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
        """Sample the routers' statuses, once a second."""

    def desired_replicas(self, now: float, statuses: Sequence[PoolSnapshot]) -> float:
        """Return the desired instances. The caller rounds the number up at each sync."""


class Scaler(Protocol):
    """The metric that scales a pool. None stands for a fleet that is not scaled."""

    def meter(self, pool: Pool, *, routers: int) -> Meter:
        """Return a new meter of the pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OnSlo:
    """Scales on ``dualmap_pool_desired_replicas``, summed over the routers."""

    def meter(self, pool: Pool, *, routers: int) -> Meter:
        """Return a new meter of the pool."""
        return _Slo(pool, routers)


@dataclass(frozen=True, slots=True, kw_only=True)
class OnQueue:
    """Scales on the requests in flight: one instance per ``requests``, a common rule with vLLM's own metrics.

    Requests queued in the routers count, because without the router they would wait in the engines' queues. The metric
    is the mean since the last sync, so that a short burst at a sync has little effect.
    """

    requests: float

    def meter(self, pool: Pool, *, routers: int) -> Meter:
        """Return a new meter of the pool."""
        return _Queue(self.requests)


class _Slo:
    def __init__(self, pool: Pool, routers: int) -> None:
        self._scalings = tuple(Scaling(pool) for _ in range(routers))
        # The last desired replicas of each router, as the other routers have received them.
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
        """Do nothing: the rule's input is updated at each sync."""

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
        """Do nothing: the metric does not depend on the pool's settings."""

    def routed(self, now: float, router: int, receipt: Receipt) -> None:
        """Do nothing: ``sample`` counts the requests in flight."""

    def held(self, now: float, router: int) -> None:
        """Do nothing: ``sample`` counts the queued requests."""

    def refused(self, now: float, router: int) -> None:
        """Do nothing: a rejected request is not in flight."""

    def first_token(self, now: float, router: int, first_token: FirstToken) -> None:
        """Do nothing: a request is in flight until it ends."""

    def sample(self, statuses: Sequence[PoolSnapshot]) -> None:
        in_flight = sum(endpoint.in_flight for status in statuses for endpoint in status.endpoints)
        self._samples.append(in_flight + sum(status.held for status in statuses))

    def desired_replicas(self, now: float, statuses: Sequence[PoolSnapshot]) -> float:
        samples, self._samples = self._samples, []
        return sum(samples) / len(samples) / self._requests if samples else 0.0
