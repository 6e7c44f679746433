"""The sidecar's metrics for Prometheus (docs/metrics.md)."""

from typing import Final

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from dualmap_sidecar.outcomes import Continued, Reason, Where

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
_SECONDS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0)


class SidecarMetrics:
    """The metrics of one proxy, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        prefills = Counter(
            "dualmap_pd_prefills",
            "Generations, by where their prompt was prefilled.",
            ("where",),
            registry=self._registry,
        )
        failures = Counter(
            "dualmap_pd_prefill_failures",
            "Prefillers that did not prefill a prompt, by reason.",
            ("reason",),
            registry=self._registry,
        )
        self._prefills = {where: prefills.labels(where) for where in Where}
        self._failures = {reason: failures.labels(reason) for reason in Reason}
        self._seconds = Histogram(
            "dualmap_pd_prefill_seconds",
            "Time from the request to a prefiller until its complete answer, in seconds.",
            buckets=_SECONDS,
            registry=self._registry,
        )
        continued = Counter(
            "dualmap_pd_continued",
            "Attempts to continue a stream whose engine ended before its answer, by result.",
            ("result",),
            registry=self._registry,
        )
        self._continued = {result: continued.labels(result) for result in Continued}
        self._in_flight = Gauge(
            "dualmap_pd_in_flight_requests", "Requests that the proxy is answering.", registry=self._registry
        )

    def show_in_flight(self, requests: int) -> None:
        """Set the number of requests in flight."""
        self._in_flight.set(requests)

    def prefilled(self, where: Where) -> None:
        """Count a generation whose prompt was prefilled."""
        self._prefills[where].inc()

    def prefill_took(self, seconds: float) -> None:
        """Observe the duration of a prefill by another engine."""
        self._seconds.observe(seconds)

    def prefill_failed(self, reason: Reason, count: int = 1) -> None:
        """Count prefillers that did not prefill a prompt."""
        self._failures[reason].inc(count)

    def continued(self, result: Continued) -> None:
        """Count an attempt to continue a stream."""
        self._continued[result].inc()

    def render(self) -> bytes:
        """Return the metrics page in Prometheus' text format."""
        return generate_latest(self._registry)
