"""A fake OpenTelemetry collector, which receives OTLP over gRPC on its own port and keeps the spans."""

from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from ports import reserved_port


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """``spans`` has all received spans, ``resources`` the senders' attributes. A restart uses the same port."""

    def __init__(self) -> None:
        self.port = reserved_port()
        self.spans: list[Span] = []
        self.resources: list[dict[str, Any]] = []
        self._server: grpc.Server | None = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self._server = grpc.server(ThreadPoolExecutor(max_workers=2), options=[("grpc.so_reuseport", 0)])
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        self._server.start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop(None).wait()
            self._server = None

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        for each in request.resource_spans:
            self.resources.append(values(each.resource.attributes))
            self.spans += [span for scope in each.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()


def values(attributes: Any) -> dict[str, Any]:
    """Return attributes as plain values."""
    return {each.key: _plain(each.value) for each in attributes}


def _plain(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_plain(each) for each in value.array_value.values]
    return getattr(value, kind)
