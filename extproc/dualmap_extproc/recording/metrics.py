"""Metrics of the recording, which exist only if the router records."""

from prometheus_client import CollectorRegistry, Counter, Gauge


class RecordingMetrics:
    """The metrics of one router's recording. Any thread may set them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._up = Gauge(
            "dualmap_recording_up", "1 while requests are recorded, 0 while they cannot be written.", registry=registry
        )
        self._dropped = Counter(
            "dualmap_recording_dropped", "Requests that are missing in the recording.", registry=registry
        )
        self.set_up(is_up=True)

    def set_up(self, *, is_up: bool) -> None:
        """Show whether requests are recorded."""
        self._up.set(1 if is_up else 0)

    def dropped(self, requests: int) -> None:
        """Count requests that are not recorded."""
        self._dropped.inc(requests)
