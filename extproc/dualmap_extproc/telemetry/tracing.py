"""OpenTelemetry tracing: one span for each decision, with the fields of its receipt, in the trace of the request.

Only this module imports OpenTelemetry. ``app.observers`` imports this module only if spans are exported
(``--otlp-endpoint``). Spans contain the fields of receipts, and never a prompt. docs/tracing.md lists the attributes of
spans.
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
# The headers of W3C Trace Context: the trace of a request, and whether the client records the trace.
TRACE_HEADERS: Final = frozenset({"traceparent", "tracestate"})

# The most spans that wait for export. While the queue is full, the router makes no spans. The library exports spans in
# batches, at the latest after a second. The library drops a batch that the collector does not accept within the
# timeout.
QUEUE_SPANS: Final = 2048
_BATCH_SPANS: Final = 512
_DELAY_MS: Final = 1000
_EXPORT_TIMEOUT_S: Final = 5.0
# The longest time that the router waits for the last export before it ends.
FLUSH_S: Final = 3.0

_log = get_logger(__name__)


def clock_offset_ns() -> int:
    """Return the wall clock's time minus the monotonic clock's time, in nanoseconds."""
    return time.time_ns() - time.monotonic_ns()


class Tracing:
    """A subscriber that makes spans from observations.

    A thread exports the spans. Only ``close`` waits for the collector.

    ``shown`` is the collector's name in log lines. Spans use the wall clock, and observations use the monotonic clock;
    ``offset_ns`` returns the difference. The exporter calls ``offset_ns`` at the start and at each export, but not for
    each span. After a jump of the wall clock, spans have correct times from the next batch on.
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
        # The library's own log is disabled, because it has several lines per failed batch. _Exports logs one line.
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
        """Subscribe to the observations that become spans."""
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
        """Make the span of a request with this ``arrival`` and a decision at ``now``.

        The method makes no span if the client does not record the trace, or while the export queue is full. For a
        request without a trace, the span begins a new trace.
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
        # If the sampler or OTEL_SDK_DISABLED excludes a span, the span is not exported and does not count as queued.
        if span.is_recording() and span.get_span_context().trace_flags.sampled:
            self._exports.came()
        span.end(end_ns)

    def close(self) -> None:
        """Export the queued spans; block for at most FLUSH_S."""
        # The flush runs in a daemon thread, because each of several batches may take its whole timeout.
        flushing = threading.Thread(target=self._provider.shutdown, daemon=True)
        flushing.start()
        flushing.join(FLUSH_S)


def tracing_to(endpoint: str, *, replica_id: str, version: str) -> Tracing:
    """Return a Tracing object for a collector at ``http://HOST:PORT``, or ``https://`` for TLS (OTLP over gRPC).

    Raises TracingError for OTEL_* settings in the environment that OpenTelemetry rejects.
    """
    try:
        exporter = OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_TIMEOUT_S)
        return Tracing(exporter, replica_id=replica_id, version=version, shown=endpoint)
    except Exception as error:  # The library may raise any error for invalid OTEL_* settings.
        raise TracingError(f"invalid OTEL_* environment variables: {error}") from error


class _Exports(SpanExporter):
    """An exporter of spans, which logs the beginning and the end of a period with dropped spans.

    The router drops spans that the collector does not accept, and new spans while ``queue_spans`` spans are queued. The
    event loop counts queued spans, and the export thread counts exported spans.
    """

    def __init__(self, exporter: SpanExporter, shown: str, *, queue_spans: int, offset_ns: Callable[[], int]) -> None:
        self._exporter = exporter
        self._shown = shown
        self._queue_spans = queue_spans
        self._read_offset_ns = offset_ns
        # A monotonic time plus this offset is the time of the wall clock. The export thread updates the offset.
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
            _log.info("Span export queue has room again", collector=self._shown)
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
