"""Makes the config sources: Envoy requests endpoints, and with ``--discover`` clusters and routes, from the routers.

``dualmap_extproc.envoy.discovery.service`` answers these requests.
"""

from datetime import timedelta

from envoy_data_plane.envoy.config.core.v3 import (
    AggregatedConfigSource,
    ApiConfigSource,
    ApiConfigSourceApiType,
    ApiVersion,
    BackoffStrategy,
    ConfigSource,
)
from envoy_data_plane.envoy.config.core.v3 import RetryPolicy as GrpcRetryPolicy

from dualmap_extproc.envoy.config.extensions import grpc_to

ROUTERS_CLUSTER = "dualmap-routers"

# The longest time that Envoy delays its listener while discovery does not answer.
_FETCH_TIMEOUT = timedelta(seconds=5)


def reconnect_policy() -> GrpcRetryPolicy:
    """Return a policy that reopens a broken gRPC stream within a second; Envoy's default backoff grows to 30 s."""
    return GrpcRetryPolicy(
        retry_back_off=BackoffStrategy(base_interval=timedelta(milliseconds=100), max_interval=timedelta(seconds=1))
    )


def own_stream() -> ConfigSource:
    """Return the source for a cluster in the bootstrap: Envoy requests the cluster's endpoints on a separate stream."""
    return ConfigSource(
        resource_api_version=ApiVersion.V3, initial_fetch_timeout=_FETCH_TIMEOUT, api_config_source=_routers()
    )


def shared_stream() -> ConfigSource:
    """Return the source for the shared stream (ADS): one router sends all resources, clusters before routes."""
    return ConfigSource(
        resource_api_version=ApiVersion.V3, initial_fetch_timeout=_FETCH_TIMEOUT, ads=AggregatedConfigSource()
    )


def shared_stream_to() -> ApiConfigSource:
    """Return the target of ``shared_stream``, for the bootstrap's ``ads_config``."""
    return _routers()


def _routers() -> ApiConfigSource:
    """Return a source that connects to any router; Envoy quickly reopens a broken stream at another router."""
    service = grpc_to(ROUTERS_CLUSTER)
    assert service.envoy_grpc is not None
    service.envoy_grpc.retry_policy = reconnect_policy()
    return ApiConfigSource(
        api_type=ApiConfigSourceApiType.GRPC,
        transport_api_version=ApiVersion.V3,
        set_node_on_first_message_only=True,
        grpc_services=[service],
    )
