"""Where Envoy asks the routers for what may change: endpoints, and with ``--discover`` clusters and routes too.

For ``bootstrap``, ``clusters`` and ``listeners``. The routers' side of it is
``dualmap_extproc.envoy.discovery.service``.
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

# How long Envoy holds back its listener for an answer that does not come.
_FETCH_TIMEOUT = timedelta(seconds=5)


def reconnect_policy() -> GrpcRetryPolicy:
    """Open a broken gRPC stream again within a second; Envoy's own back-off grows to half a minute."""
    return GrpcRetryPolicy(
        retry_back_off=BackoffStrategy(base_interval=timedelta(milliseconds=100), max_interval=timedelta(seconds=1))
    )


def own_stream() -> ConfigSource:
    """Ask on a stream of one's own, as each cluster that stands in the bootstrap does for its endpoints."""
    return ConfigSource(
        resource_api_version=ApiVersion.V3, initial_fetch_timeout=_FETCH_TIMEOUT, api_config_source=_routers()
    )


def shared_stream() -> ConfigSource:
    """Ask on the one stream of ``shared_stream_to``: all of it comes from one router, clusters before their routes."""
    return ConfigSource(
        resource_api_version=ApiVersion.V3, initial_fetch_timeout=_FETCH_TIMEOUT, ads=AggregatedConfigSource()
    )


def shared_stream_to() -> ApiConfigSource:
    """Say where ``shared_stream`` leads, as the bootstrap's ``ads_config``."""
    return _routers()


def _routers() -> ApiConfigSource:
    """Ask whichever router answers; a stream that breaks is soon opened again, to another."""
    service = grpc_to(ROUTERS_CLUSTER)
    assert service.envoy_grpc is not None
    service.envoy_grpc.retry_policy = reconnect_policy()
    return ApiConfigSource(
        api_type=ApiConfigSourceApiType.GRPC,
        transport_api_version=ApiVersion.V3,
        set_node_on_first_message_only=True,
        grpc_services=[service],
    )
