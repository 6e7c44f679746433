"""OpenTelemetry: one span for each decision, with its receipt, under the trace that the request came with.

The only module that knows OpenTelemetry; ``wiring`` alone imports it, and only where spans are exported
(``--otlp-endpoint``), so that a router that exports none pays nothing. ``TracedPicker`` stands in the picker's place.
Spans bear what receipts do, never a prompt. docs/tracing.md lists their attributes.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from dualmap.prompts.api import Api
from dualmap.requests import Decision
from dualmap_edge.logs import get_logger
from dualmap_extproc.errors import Refused
from dualmap_extproc.request.picker import Picked, Picker, Waiting
from dualmap_extproc.settings import TracingError

SPAN: Final = "dualmap.route"
# W3C Trace Context: which trace a request belongs to, and whether it is one of those that are recorded.
TRACE_HEADERS: Final = frozenset({"traceparent", "tracestate"})

# Spans that wait to be sent; beyond them none are made. They go out in batches, after a second at the latest,
# and a batch that the collector has not taken after so many seconds is dropped.
QUEUE_SPANS: Final = 2048
_BATCH_SPANS: Final = 512
_DELAY_MS: Final = 1000
_EXPORT_TIMEOUT_S: Final = 5.0
# How long the router's end is held up for what is still to be sent.
FLUSH_S: Final = 3.0

_log = get_logger(__name__)


@dataclass(slots=True, kw_only=True)
class Begun:
    """A decision that is being made: the trace it belongs to, when its request came, and since when it is held.

    ``request_id`` is the held request's, empty otherwise.
    ``arrived_ns`` is by the wall clock, as spans are; all that is measured from there on is by the monotonic one.
    """

    context: Context
    arrived_ns: int
    begun_s: float
    held_s: float | None = None
    request_id: str = ""


class Tracing:
    """Where spans go. They are sent by a thread of its own; nothing here waits for a collector but ``close``.

    ``shown`` names the collector in log lines.
    """

    def __init__(self, exporter: SpanExporter, *, replica_id: str, version: str, shown: str = "") -> None:
        # Its own words, several for each batch that fails, would fill the log: _Told says it once.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        resource = Resource.create(
            {"service.name": "dualmap-router", "service.instance.id": replica_id, "service.version": version}
        )
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._told = _Told(exporter, shown, queue_spans=QUEUE_SPANS)
        self._provider.add_span_processor(
            BatchSpanProcessor(
                self._told,
                max_queue_size=QUEUE_SPANS,
                max_export_batch_size=_BATCH_SPANS,
                schedule_delay_millis=_DELAY_MS,
            )
        )
        self._tracer = self._provider.get_tracer("dualmap", version)
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, headers: Mapping[str, str], *, age_s: float) -> Begun | None:
        """Take up the trace of a request that came ``age_s`` ago; None where its sender does not record it.

        A request that names no trace begins one of its own.
        """
        context = self._propagator.extract(headers, Context())
        parent = trace.get_current_span(context).get_span_context()
        if parent.is_valid and not parent.trace_flags.sampled:
            return None
        return Begun(context=context, arrived_ns=time.time_ns() - int(age_s * 1e9), begun_s=time.monotonic() - age_s)

    def end(self, begun: Begun, outcome: Picked | Refused | None) -> None:
        """Make the span of a decision: an instance, a refusal, or None where the client left while it was held.

        There is none while as many wait as may.
        """
        if self._told.is_full():
            return
        now_s = time.monotonic()
        attributes: dict[str, AttributeValue] = {}
        if begun.held_s is not None:
            attributes["dualmap.held_s"] = round(now_s - begun.held_s, 6)
        failed = False
        if isinstance(outcome, Refused):
            attributes |= _refusal(outcome)
            failed = outcome.status >= 500
        elif outcome is None:
            attributes["error.type"] = "client_gone"
        elif outcome.decision is not None:
            attributes |= _decision(outcome.decision)
        span = self._tracer.start_span(SPAN, context=begun.context, attributes=attributes, start_time=begun.arrived_ns)
        if failed:
            span.set_status(trace.StatusCode.ERROR)
        # One that the sampler leaves out, or OTEL_SDK_DISABLED, is never exported, and so is none of those that wait.
        if span.is_recording() and span.get_span_context().trace_flags.sampled:
            self._told.came()
        span.end(begun.arrived_ns + int((now_s - begun.begun_s) * 1e9))

    def close(self) -> None:
        """Send what waits, for FLUSH_S at the most; blocks for as long."""
        # A thread that nobody waits for: of several batches each may take its whole time.
        flushing = threading.Thread(target=self._provider.shutdown, daemon=True)
        flushing.start()
        flushing.join(FLUSH_S)


def tracing_to(endpoint: str, *, replica_id: str, version: str) -> Tracing:
    """Return where spans go: to a collector at ``http://HOST:PORT``, or ``https://`` for TLS (OTLP over gRPC).

    Raises TracingError for OpenTelemetry's own settings in the environment that it cannot use.
    """
    try:
        exporter = OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_TIMEOUT_S)
        return Tracing(exporter, replica_id=replica_id, version=version, shown=endpoint)
    except Exception as error:  # The library raises whatever its parsing of OTEL_* happens to raise.
        raise TracingError(f"the environment's OTEL_* settings cannot be used: {error}") from error


class TracedPicker(Picker):
    """A Picker that makes a span of each decision on a request that belongs to a pool, or fails to."""

    def __init__(self, *arguments: Any, tracing: Tracing, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._tracing = tracing
        # Decisions on requests that are held, by request id.
        self._begun: dict[str, Begun] = {}

    @property
    def session_headers(self) -> frozenset[str]:
        """The lower-case names of the headers that ``pick`` wants: by which pools name sessions, and the trace's."""
        return super().session_headers | TRACE_HEADERS

    def pick(
        self,
        now: float,
        body: bytes,
        subset: frozenset[str] | None,
        arrived_s: float,
        *,
        headers: Mapping[str, str],
        resume: Callable[[Picked | Refused], None],
        api: Api = Api.UNKNOWN,
    ) -> Picked | Refused | Waiting:
        """Choose as Picker does, and make the span once it is decided."""
        begun = self._tracing.begin(headers, age_s=now - arrived_s)
        if begun is None:
            return super().pick(now, body, subset, arrived_s, headers=headers, resume=resume, api=api)

        def resumed(outcome: Picked | Refused) -> None:
            self._begun.pop(begun.request_id, None)
            self._tracing.end(begun, outcome)
            resume(outcome)

        outcome = super().pick(now, body, subset, arrived_s, headers=headers, resume=resumed, api=api)
        if isinstance(outcome, Waiting):
            begun.request_id, begun.held_s = outcome.request_id, time.monotonic()
            self._begun[outcome.request_id] = begun
        else:
            self._tracing.end(begun, outcome)
        return outcome

    def refuse(self, refused: Refused, headers: Mapping[str, str] | None = None) -> Refused:
        """Report a refusal as Picker does; one that ``stream`` decided, before any pick, gets its span here."""
        begun = None if headers is None else self._tracing.begin(headers, age_s=0.0)
        if begun is not None:
            self._tracing.end(begun, refused)
        return super().refuse(refused)

    def aborted(self, now: float, request_id: str) -> None:
        """Close a request that was cancelled, as Picker does; that ends the span of one that is held."""
        begun = self._begun.pop(request_id, None)
        if begun is not None:
            self._tracing.end(begun, None)
        super().aborted(now, request_id)


class _Told(SpanExporter):
    """Exports, and says in our log when spans begin to be lost and when that is over.

    They are lost where the collector does not take them, and where they come faster than it does: while ``queue_spans``
    wait, no more are made. Those that came are counted by the event loop alone, those taken by the thread that exports.
    """

    def __init__(self, exporter: SpanExporter, shown: str, *, queue_spans: int) -> None:
        self._exporter = exporter
        self._shown = shown
        self._queue_spans = queue_spans
        self._failing = False
        self._behind = False
        self._came = 0
        self._taken = 0

    def is_full(self) -> bool:
        """Whether so many wait already that the next one is lost."""
        full = self._came - self._taken >= self._queue_spans
        if full and not self._behind:
            self._behind = True
            _log.warning("spans come faster than they are delivered, further ones are dropped", collector=self._shown)
        return full

    def came(self) -> None:
        """Take note that one more waits."""
        self._came += 1

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._taken += len(spans)
        try:
            result = self._exporter.export(spans)
        except Exception:  # noqa: BLE001  # Whatever the library cannot send is lost, and it would say so to nobody.
            result = SpanExportResult.FAILURE
        failing = result is not SpanExportResult.SUCCESS
        if failing and not self._failing:
            _log.warning(
                "spans cannot be delivered and are dropped until they can", collector=self._shown, spans=len(spans)
            )
        elif self._failing and not failing:
            _log.info("spans are delivered again", collector=self._shown)
        self._failing = failing
        if self._behind and self._came - self._taken < self._queue_spans // 2:
            self._behind = False
            _log.info("spans are delivered as fast as they come", collector=self._shown)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


def _decision(decision: Decision) -> dict[str, AttributeValue]:
    receipt = decision.receipt
    return {
        "dualmap.request_id": decision.request_id,
        "dualmap.pools.pool": receipt.pool,
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


def _refusal(refused: Refused) -> dict[str, AttributeValue]:
    attributes: dict[str, AttributeValue] = {
        "http.response.status_code": refused.status,
        "error.type": refused.code,
    }
    if refused.pool:
        attributes["dualmap.pools.pool"] = refused.pool
    return attributes
