"""OpenTelemetry: one span for each decision, with its receipt, in the trace of the request.

The only module that imports OpenTelemetry. ``app.wiring`` imports it only where spans are exported
(``--otlp-endpoint``). Spans have what receipts have, never a prompt. docs/tracing.md lists their attributes.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from dualmap.requests import Decision
from dualmap_edge.logs import get_logger
from dualmap_extproc.errors import Refused
from dualmap_extproc.request.observations import Abandoned, Arrival, FanOut, Rejected, Routed
from dualmap_extproc.settings import TracingError

SPAN: Final = "dualmap.route"
# W3C Trace Context: the trace of a request, and whether the client records it.
TRACE_HEADERS: Final = frozenset({"traceparent", "tracestate"})

# Spans that wait for export; while so many wait, none are made. They are exported in batches, after a second at the
# latest. A batch that the collector does not accept within the timeout is dropped.
QUEUE_SPANS: Final = 2048
_BATCH_SPANS: Final = 512
_DELAY_MS: Final = 1000
_EXPORT_TIMEOUT_S: Final = 5.0
# The longest time that the router's end waits for the last export.
FLUSH_S: Final = 3.0

_log = get_logger(__name__)


def clock_offset_ns() -> int:
    """Return the wall clock's lead over the monotonic clock, in nanoseconds."""
    return time.time_ns() - time.monotonic_ns()


class Tracing:
    """Makes spans of observations and exports them in a thread; only ``close`` waits for the collector.

    ``shown`` names the collector in log lines. Spans are on the wall clock, observations on the monotonic one:
    ``offset_ns`` returns their difference. It is read at the start and again at each export, never for a span, so spans
    follow a jump of the wall clock from the next batch on.
    """

    def __init__(
        self,
        exporter: SpanExporter,
        *,
        replica_id: str,
        version: str,
        shown: str = "",
        offset_ns: Callable[[], int] = clock_offset_ns,
    ) -> None:
        # The library logs several lines for each batch that fails; _Exports logs one.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        resource = Resource.create(
            {"service.name": "dualmap-router", "service.instance.id": replica_id, "service.version": version}
        )
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._exports = _Exports(exporter, shown, queue_spans=QUEUE_SPANS, offset_ns=offset_ns)
        self._provider.add_span_processor(
            BatchSpanProcessor(
                self._exports,
                max_queue_size=QUEUE_SPANS,
                max_export_batch_size=_BATCH_SPANS,
                schedule_delay_millis=_DELAY_MS,
            )
        )
        self._tracer = self._provider.get_tracer("dualmap", version)
        self._propagator = TraceContextTextMapPropagator()

    def subscribe(self, observations: FanOut) -> None:
        """Make a span of each of these observations."""
        observations.subscribe(Routed, self._routed)
        observations.subscribe(Rejected, self._rejected)
        observations.subscribe(Abandoned, self._abandoned)

    def _routed(self, routed: Routed) -> None:
        self._span(routed.now, routed.arrival, routed.queued_s, lambda: _decision(routed.decision))

    def _rejected(self, rejected: Rejected) -> None:
        # A request without a prompt has no span.
        if rejected.arrival is not None:
            failed = rejected.refused.status >= 500
            attributes = partial(_rejection, rejected.refused)
            self._span(rejected.now, rejected.arrival, rejected.queued_s, attributes, failed=failed)

    def _abandoned(self, abandoned: Abandoned) -> None:
        self._span(abandoned.now, abandoned.arrival, abandoned.queued_s, lambda: {"error.type": "client_gone"})

    def _span(
        self,
        now: float,
        arrival: Arrival,
        queued_s: float | None,
        attributes_of: Callable[[], dict[str, AttributeValue]],
        *,
        failed: bool = False,
    ) -> None:
        """Make the span of a request that arrived at ``arrival`` and was decided on at ``now``.

        There is none where the client does not record the trace, or while the export queue is full. A request without
        a trace begins one.
        """
        context = self._propagator.extract(arrival.headers, Context())
        parent = trace.get_current_span(context).get_span_context()
        if (parent.is_valid and not parent.trace_flags.sampled) or self._exports.is_full():
            return
        attributes = attributes_of()
        if queued_s is not None:
            attributes["dualmap.held_s"] = round(queued_s, 6)
        end_ns = self._exports.offset_ns + int(now * 1e9)
        start_ns = end_ns - int((now - arrival.at_s) * 1e9)
        span = self._tracer.start_span(SPAN, context=context, attributes=attributes, start_time=start_ns)
        if failed:
            span.set_status(trace.StatusCode.ERROR)
        # A span that the sampler or OTEL_SDK_DISABLED leaves out is never exported and does not count as queued.
        if span.is_recording() and span.get_span_context().trace_flags.sampled:
            self._exports.came()
        span.end(end_ns)

    def close(self) -> None:
        """Export what is queued; blocks for FLUSH_S at most."""
        # A daemon thread: with several batches each may take its whole timeout.
        flushing = threading.Thread(target=self._provider.shutdown, daemon=True)
        flushing.start()
        flushing.join(FLUSH_S)


def tracing_to(endpoint: str, *, replica_id: str, version: str) -> Tracing:
    """Return a Tracing to a collector at ``http://HOST:PORT``, or ``https://`` for TLS (OTLP over gRPC).

    Raises TracingError for OTEL_* settings in the environment that OpenTelemetry rejects.
    """
    try:
        exporter = OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_TIMEOUT_S)
        return Tracing(exporter, replica_id=replica_id, version=version, shown=endpoint)
    except Exception as error:  # The library raises whatever its parsing of OTEL_* happens to raise.
        raise TracingError(f"invalid OTEL_* environment variables: {error}") from error


class _Exports(SpanExporter):
    """Exports spans, and logs when spans begin to be dropped and when that ends.

    Spans are dropped when the collector does not accept them, and while ``queue_spans`` are queued. The event loop
    counts the queued ones, the export thread the exported ones.
    """

    def __init__(self, exporter: SpanExporter, shown: str, *, queue_spans: int, offset_ns: Callable[[], int]) -> None:
        self._exporter = exporter
        self._shown = shown
        self._queue_spans = queue_spans
        self._read_offset_ns = offset_ns
        # A monotonic time plus this offset is the time of the wall clock. The export thread keeps it up to date.
        self.offset_ns = offset_ns()
        self._failing = False
        self._behind = False
        self._came = 0
        self._taken = 0

    def is_full(self) -> bool:
        """Return whether the queue is full, so that the next span is dropped."""
        full = self._came - self._taken >= self._queue_spans
        if full and not self._behind:
            self._behind = True
            _log.warning("Dropping spans, export queue is full", collector=self._shown)
        return full

    def came(self) -> None:
        """Count a span that enters the queue."""
        self._came += 1

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._taken += len(spans)
        self.offset_ns = self._read_offset_ns()
        try:
            result = self._exporter.export(spans)
        except Exception:  # noqa: BLE001  # The library would drop the spans without a log line.
            result = SpanExportResult.FAILURE
        failing = result is not SpanExportResult.SUCCESS
        if failing and not self._failing:
            _log.warning("Dropping spans, export failed", collector=self._shown, spans=len(spans))
        elif self._failing and not failing:
            _log.info("Span export recovered", collector=self._shown)
        self._failing = failing
        if self._behind and self._came - self._taken < self._queue_spans // 2:
            self._behind = False
            _log.info("Span export queue drained", collector=self._shown)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


def _decision(decision: Decision) -> dict[str, AttributeValue]:
    receipt = decision.receipt
    return {
        "dualmap.request_id": decision.request_id,
        "dualmap.pool": receipt.pool,
        "dualmap.policy": receipt.policy,
        "dualmap.rule": receipt.rule,
        "dualmap.pair": receipt.pair,
        "dualmap.chosen": receipt.chosen,
        "dualmap.endpoint": receipt.address,
        "dualmap.prompt_tokens": receipt.prompt_tokens,
        "dualmap.matched_tokens": receipt.matched_tokens,
        "dualmap.key_blocks": receipt.key.blocks,
        "dualmap.predicted_ttft_s": receipt.predicted_ttft_s,
    }


def _rejection(refused: Refused) -> dict[str, AttributeValue]:
    attributes: dict[str, AttributeValue] = {
        "http.response.status_code": refused.status,
        "error.type": refused.code,
    }
    if refused.pool:
        attributes["dualmap.pool"] = refused.pool
    return attributes
