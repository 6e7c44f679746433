"""Makes Envoy's HTTP filters: ext_proc, which calls the router, and the filter of the module ``usage``."""

from datetime import timedelta

from envoy_data_plane.envoy.config.core.v3 import RetryPolicy as GrpcRetryPolicy
from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import (
    ExternalProcessor,
    ExtProcOverrides,
    ExtProcPerRoute,
    MetadataOptions,
    MetadataOptionsMetadataNamespaces,
    ProcessingMode,
    ProcessingModeBodySendMode,
    ProcessingModeHeaderSendMode,
)
from envoy_data_plane.envoy.extensions.filters.http.router.v3 import Router
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import HttpFilter
from envoy_data_plane.envoy.type.v3 import HttpStatus, StatusCode
from envoy_data_plane.google.protobuf import Any

from dualmap_extproc.envoy.config.extensions import grpc_to, packed
from dualmap_extproc.envoy.config.http.usage import usage_filter
from dualmap_extproc.envoy.config.settings import EnvoySettings, Mode
from dualmap_extproc.envoy.config.sources import ROUTERS_CLUSTER
from dualmap_extproc.names import DUALMAP_NAMESPACE, LB_NAMESPACE, SUBSET_NAMESPACE

# Envoy's timeout for an answer is the longest queueing time, but at least the minimum, plus the margin. After the
# timeout, Envoy fails open. The minimum keeps the timeout above the router's limit for a pause within a body
# (Limits.stalled_s).
_WAIT_MIN = timedelta(seconds=30)
ANSWER_MARGIN = timedelta(seconds=15)

EXT_PROC = "envoy.filters.http.ext_proc"


def http_filters(settings: EnvoySettings) -> list[HttpFilter]:
    """Return the filter chain; responses pass the filters in reverse order.

    The chain disables ext_proc, and each route to a pool enables it (``ext_proc_enabled``). With ext_proc enabled in
    the chain, ext_proc would also process Envoy's own error for a request without a route. This error would wait for a
    router that has not received the request. If the connection closed meanwhile, the client would not get the error. In
    tests, requests with an invalid head got no 400, and CONNECT requests hung.
    """
    return [
        HttpFilter(name=EXT_PROC, typed_config=packed(_ext_proc(settings)), disabled=True),
        usage_filter(),
        HttpFilter(name="envoy.filters.http.router", typed_config=packed(Router(suppress_envoy_headers=True))),
    ]


def ext_proc_enabled() -> dict[str, Any]:
    """Return the ``typed_per_filter_config`` of a route that enables ext_proc."""
    return {EXT_PROC: packed(ExtProcPerRoute(overrides=ExtProcOverrides()))}


def _ext_proc(settings: EnvoySettings) -> ExternalProcessor:
    """Return the filter that calls the router. Envoy drops metadata namespaces that metadata_options does not list."""
    timeout = max(timedelta(seconds=settings.longest_wait_s), _WAIT_MIN) + ANSWER_MARGIN
    service = grpc_to(ROUTERS_CLUSTER)
    service.retry_policy = GrpcRetryPolicy(retry_on="connect-failure,refused-stream", num_retries=1)
    no_wait = settings.mode is Mode.STREAMED
    return ExternalProcessor(
        grpc_service=service,
        failure_mode_allow=True,
        status_on_error=HttpStatus(code=StatusCode.ServiceUnavailable),
        message_timeout=timeout,
        max_message_timeout=timeout,
        processing_mode=_processing_mode(settings.mode),
        send_body_without_waiting_for_header_response=no_wait,
        allow_content_length_header=no_wait,
        metadata_options=MetadataOptions(
            receiving_namespaces=MetadataOptionsMetadataNamespaces(untyped=[LB_NAMESPACE, DUALMAP_NAMESPACE]),
            forwarding_namespaces=MetadataOptionsMetadataNamespaces(untyped=[LB_NAMESPACE, SUBSET_NAMESPACE]),
        ),
    )


def _processing_mode(mode: Mode) -> ProcessingMode:
    """Return the messages that Envoy sends to the router; a FULL_DUPLEX body requires trailers.

    Responses are STREAMED in every mode. The router ends the stream at the first chunk. The response therefore
    continues if the router fails later. With FULL_DUPLEX responses, a failed router truncated the response in tests.
    """
    send = ProcessingModeHeaderSendMode.SEND
    skip = ProcessingModeHeaderSendMode.SKIP
    bodies = ProcessingModeBodySendMode
    request_body = {
        Mode.STREAMED: bodies.STREAMED,
        Mode.FULL_DUPLEX: bodies.FULL_DUPLEX_STREAMED,
        Mode.BUFFERED: bodies.BUFFERED,
    }
    return ProcessingMode(
        request_header_mode=send,
        request_body_mode=request_body[mode],
        request_trailer_mode=send if mode is Mode.FULL_DUPLEX else skip,
        response_header_mode=send,
        response_body_mode=bodies.STREAMED,
        response_trailer_mode=skip,
    )
