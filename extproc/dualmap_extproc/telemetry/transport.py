"""Metrics of the transport: connections and refusals of the HTTP/2 server, and the delay of the event loop."""

import asyncio
from collections.abc import Iterable, Mapping
from typing import Final, Protocol

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

_CHECK_S: Final = 0.1
# Envoy counts a router as lost whose loop is late by two seconds.
_BUCKETS_S: Final = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0)
# These reasons have a series from the start, because an alert needs the value 0 before the first event.
_REASONS: Final = (
    *("drain", "handshake", "silence", "control_frames", "resets", "header_bytes", "settings"),
    *("protocol_error", "frame_size_error", "flow_control_error", "compression_error", "stream_closed"),
)


class Server(Protocol):
    """What the HTTP/2 server reports; ``transport.http2_server`` implements this interface."""

    @property
    def connections(self) -> int:
        """The number of open connections."""

    @property
    def goaways(self) -> Mapping[str, int]:
        """The number of connections that the server ended, by the reason."""

    @property
    def refused_streams(self) -> int:
        """The number of calls that were refused because their connection had too many."""


class TransportMetrics:
    """The metrics of one router. ``run`` measures the event loop."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._server: Server | None = None
        self._lag = Histogram(
            "dualmap_event_loop_lag_seconds",
            "Delay of the router's event loop, measured ten times a second, in seconds.",
            buckets=_BUCKETS_S,
            registry=registry,
        )
        registry.register(self)

    def show(self, server: Server | None) -> None:
        """Export the counts of this server; without a server, they are 0."""
        self._server = server

    def collect(self) -> Iterable[Metric]:
        """Return the metrics of the server, for the registry."""
        server = self._server
        yield GaugeMetricFamily(
            "dualmap_http2_connections",
            "Open connections to the HTTP/2 server of the gRPC port.",
            value=0 if server is None else server.connections,
        )
        goaways = CounterMetricFamily(
            "dualmap_http2_goaways", "Connections that the HTTP/2 server ended, by the reason.", labels=("reason",)
        )
        counted = {} if server is None else server.goaways
        for reason, count in sorted({**dict.fromkeys(_REASONS, 0), **counted}.items()):
            goaways.add_metric((reason,), count)
        yield goaways
        yield CounterMetricFamily(
            "dualmap_http2_refused_streams",
            "Calls that the HTTP/2 server refused because a connection had too many.",
            value=0 if server is None else server.refused_streams,
        )

    async def run(self) -> None:
        """Measure the delay of the event loop until cancelled."""
        clock = asyncio.get_running_loop().time
        while True:
            due_s = clock() + _CHECK_S
            await asyncio.sleep(_CHECK_S)
            self._lag.observe(max(0.0, clock() - due_s))
