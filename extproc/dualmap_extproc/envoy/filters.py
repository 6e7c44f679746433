"""Envoy's HTTP filters: ext_proc towards the router, and usage read from the engines' responses into metadata."""

from datetime import timedelta

from envoy_data_plane.envoy.config.core.v3 import RetryPolicy as GrpcRetryPolicy
from envoy_data_plane.envoy.extensions.content_parsers.json.v3 import (
    JsonContentParser,
    JsonContentParserRuleConfig,
)
from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import (
    ExternalProcessor,
    MetadataOptions,
    MetadataOptionsMetadataNamespaces,
    ProcessingMode,
    ProcessingModeBodySendMode,
    ProcessingModeHeaderSendMode,
)
from envoy_data_plane.envoy.extensions.filters.http.json_to_metadata.v3 import (
    JsonToMetadata,
    JsonToMetadataKeyValuePair,
    JsonToMetadataMatchRules,
    JsonToMetadataRule,
    JsonToMetadataSelector,
    JsonToMetadataValueType,
)
from envoy_data_plane.envoy.extensions.filters.http.router.v3 import Router
from envoy_data_plane.envoy.extensions.filters.http.sse_to_metadata.v3 import (
    SseToMetadata,
    SseToMetadataProcessingRules,
)
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import HttpFilter
from envoy_data_plane.envoy.type.matcher.v3 import RegexMatcher
from envoy_data_plane.envoy.type.v3 import HttpStatus, StatusCode

from dualmap_extproc.envoy.clusters import ROUTERS_CLUSTER
from dualmap_extproc.envoy.extensions import extension, grpc_to, packed
from dualmap_extproc.envoy.settings import EnvoySettings, Mode
from dualmap_extproc.names import (
    DUALMAP_NAMESPACE,
    LB_NAMESPACE,
    SUBSET_NAMESPACE,
    TAG_CACHED_TOKENS,
    TAG_COMPLETION_TOKENS,
    TAG_PROMPT_TOKENS,
    USAGE_NAMESPACE,
)

# Where an OpenAI response says what it used -> the name we give it.
USAGE_PATHS = {
    ("usage", "prompt_tokens"): TAG_PROMPT_TOKENS,
    ("usage", "completion_tokens"): TAG_COMPLETION_TOKENS,
    ("usage", "prompt_tokens_details", "cached_tokens"): TAG_CACHED_TOKENS,
}

# Envoy waits this much longer for an answer than the router may hold a request, then it fails open.
ANSWER_MARGIN = timedelta(seconds=15)


def http_filters(settings: EnvoySettings) -> list[HttpFilter]:
    """Write the filter chain; responses walk it from the end to the start."""
    return [
        HttpFilter(name="envoy.filters.http.ext_proc", typed_config=packed(_ext_proc(settings))),
        HttpFilter(name="envoy.filters.http.sse_to_metadata", typed_config=packed(_streamed_usage())),
        HttpFilter(name="envoy.filters.http.json_to_metadata", typed_config=packed(_whole_usage())),
        HttpFilter(name="envoy.filters.http.router", typed_config=packed(Router(suppress_envoy_headers=True))),
    ]


def _ext_proc(settings: EnvoySettings) -> ExternalProcessor:
    """Write the filter that asks the router; the namespaces left out of metadata_options are dropped silently."""
    held_s = max(pool.routing.queue.max_wait_s for pool in settings.pools)
    timeout = timedelta(seconds=held_s) + ANSWER_MARGIN
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
    """Say which messages Envoy sends; FULL_DUPLEX demands trailers, and the response streamed the same way."""
    send = ProcessingModeHeaderSendMode.SEND
    skip = ProcessingModeHeaderSendMode.SKIP
    bodies = ProcessingModeBodySendMode
    duplex = mode is Mode.FULL_DUPLEX
    request_body = {
        Mode.STREAMED: bodies.STREAMED,
        Mode.FULL_DUPLEX: bodies.FULL_DUPLEX_STREAMED,
        Mode.BUFFERED: bodies.BUFFERED,
    }
    return ProcessingMode(
        request_header_mode=send,
        request_body_mode=request_body[mode],
        request_trailer_mode=send if duplex else skip,
        response_header_mode=send,
        response_body_mode=bodies.FULL_DUPLEX_STREAMED if duplex else bodies.STREAMED,
        response_trailer_mode=send if duplex else skip,
    )


def _streamed_usage() -> SseToMetadata:
    rules = [JsonContentParserRuleConfig(rule=rule) for rule in _usage_rules()]
    parser = extension("envoy.content_parsers.json", JsonContentParser(rules=rules))
    return SseToMetadata(response_rules=SseToMetadataProcessingRules(content_parser=parser))


def _whole_usage() -> JsonToMetadata:
    rules = JsonToMetadataMatchRules(
        rules=_usage_rules(), allow_content_types_regex=RegexMatcher(regex="application/json(;.*)?")
    )
    return JsonToMetadata(response_rules=rules)


def _usage_rules() -> list[JsonToMetadataRule]:
    return [
        JsonToMetadataRule(
            selectors=[JsonToMetadataSelector(key=key) for key in path],
            on_present=JsonToMetadataKeyValuePair(
                metadata_namespace=USAGE_NAMESPACE, key=name, type=JsonToMetadataValueType.NUMBER
            ),
        )
        for path, name in USAGE_PATHS.items()
    ]
