"""Makes the configuration of Envoy's access log, which reports each request's end, TTFT and usage to the routers."""

from datetime import timedelta

from envoy_data_plane.envoy.config.accesslog.v3 import AccessLog
from envoy_data_plane.envoy.config.core.v3 import ApiVersion
from envoy_data_plane.envoy.extensions.access_loggers.grpc.v3 import (
    CommonGrpcAccessLogConfig,
    HttpGrpcAccessLogConfig,
)
from envoy_data_plane.envoy.type.tracing.v3 import CustomTag

from dualmap_extproc import names
from dualmap_extproc.envoy.config.clusters import sink_cluster_name
from dualmap_extproc.envoy.config.extensions import grpc_to, packed
from dualmap_extproc.envoy.config.settings import EnvoySettings
from dualmap_extproc.envoy.config.sources import reconnect_policy

# The longest time that Envoy delays an access log entry. A router counts a finished request as in flight until its
# entry arrives.
FLUSH_INTERVAL = timedelta(milliseconds=100)
FLUSH_BYTES = 65536

# The values of the custom tags of an entry. The TTFT ends at the first body byte of the engine, because an engine sends
# headers before the prefill.
TAGS = {
    names.TAG_REQUEST_ID: f"%DYNAMIC_METADATA({names.DUALMAP_NAMESPACE}:{names.REQUEST_ID_KEY})%",
    names.TAG_TTFT_US: "%COMMON_DURATION(DS_RX_BEG:US_RX_BODY_BEG:us)%",
    names.TAG_TOTAL_US: "%COMMON_DURATION(DS_RX_BEG:DS_TX_END:us)%",
    names.TAG_FLAGS: "%RESPONSE_FLAGS%",
    names.TAG_ENDPOINT: f"%DYNAMIC_METADATA({names.LB_NAMESPACE}:{names.DESTINATION_KEY})%",
    **{
        tag: f"%DYNAMIC_METADATA({names.USAGE_NAMESPACE}:{tag})%"
        for tag in (names.TAG_PROMPT_TOKENS, names.TAG_COMPLETION_TOKENS, names.TAG_CACHED_TOKENS)
    },
}


def access_logs(settings: EnvoySettings) -> list[AccessLog]:
    """Return one logger per sink.

    With one logger per sink, each sink gets every entry. Only the router that picked a request's member needs the
    request's entry. A logger whose cluster has several hosts sends all entries of a worker of Envoy to one host. The
    log's name tells this router to send the other routers' entries to them.
    """
    log_name = names.SHARED_ACCESS_LOG if settings.shares_access_log else names.ACCESS_LOG
    return [
        AccessLog(
            name="envoy.access_loggers.http_grpc", typed_config=packed(_logger(log_name, sink_cluster_name(index)))
        )
        for index in range(len(settings.access_logs))
    ]


def _logger(log_name: str, cluster: str) -> HttpGrpcAccessLogConfig:
    return HttpGrpcAccessLogConfig(
        common_config=CommonGrpcAccessLogConfig(
            log_name=log_name,
            transport_api_version=ApiVersion.V3,
            grpc_service=grpc_to(cluster),
            grpc_stream_retry_policy=reconnect_policy(),
            buffer_flush_interval=FLUSH_INTERVAL,
            buffer_size_bytes=FLUSH_BYTES,
            custom_tags=[CustomTag(tag=tag, value=value) for tag, value in TAGS.items()],
        )
    )
