"""Makes the config sources that let Envoy ask the routers for endpoints, and with ``--discover`` clusters and routes.

``dualmap_extproc.envoy.discovery.service`` is the routers' side.
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

# How long Envoy delays its listener while discovery does not answer.
_FETCH_TIMEOUT = timedelta(seconds=5)


def reconnect_policy() -> GrpcRetryPolicy:
    """Return a policy that reopens a broken gRPC stream within a second; Envoy's default backoff grows to 30 s."""
    return GrpcRetryPolicy(
        retry_back_off=BackoffStrategy(base_interval=timedelta(milliseconds=100), max_interval=timedelta(seconds=1))
    )


def own_stream() -> ConfigSource:
    """Return the source of a cluster in the bootstrap, which asks for its endpoints on its own stream."""
    return ConfigSource(
        resource_api_version=ApiVersion.V3, initial_fetch_timeout=_FETCH_TIMEOUT, api_config_source=_routers()
    )


def shared_stream() -> ConfigSource:
    """Return the source that uses the shared stream: one router answers, clusters before routes."""
    return ConfigSource(
        resource_api_version=ApiVersion.V3, initial_fetch_timeout=_FETCH_TIMEOUT, ads=AggregatedConfigSource()
    )


def shared_stream_to() -> ApiConfigSource:
    """Return the target of ``shared_stream``, for the bootstrap's ``ads_config``."""
    return _routers()


def _routers() -> ApiConfigSource:
    """Return a source that asks any router; Envoy soon reopens a broken stream at another one."""
    service = grpc_to(ROUTERS_CLUSTER)
    assert service.envoy_grpc is not None
    service.envoy_grpc.retry_policy = reconnect_policy()
    return ApiConfigSource(
        api_type=ApiConfigSourceApiType.GRPC,
        transport_api_version=ApiVersion.V3,
        set_node_on_first_message_only=True,
        grpc_services=[service],
    )
