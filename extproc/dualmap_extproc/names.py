"""Names that Envoy's configuration and the router must agree on: headers, metadata, tags, gRPC paths.

``envoy/`` writes them into Envoy's configuration; the stream state machine, the access log sink and the EDS
server read and send them. Sources: GAIE proposal 004 and PROTOCOLS section 1; ``dualmap`` ones are ours.
"""

from typing import Final

# Request headers. All that begin with a reserved prefix are removed from every client's request.
DESTINATION_HEADER: Final = "x-gateway-destination-endpoint"
CLUSTER_HEADER: Final = "x-dualmap-cluster"
NO_RETRY_HEADER: Final = "x-dualmap-no-retry"
RESERVED_HEADER_PREFIXES: Final = ("x-gateway-destination-endpoint", "x-dualmap-")

# Response header with the receipt of the decision (an RFC 9651 dictionary).
DECISION_HEADER: Final = "x-dualmap-decision"

# Dynamic metadata: the protocol's two namespaces and ours, with the keys used in each.
LB_NAMESPACE: Final = "envoy.lb"
SUBSET_NAMESPACE: Final = "envoy.lb.subset_hint"
DUALMAP_NAMESPACE: Final = "dualmap"
USAGE_NAMESPACE: Final = "dualmap.usage"
DESTINATION_KEY: Final = "x-gateway-destination-endpoint"
SERVED_KEY: Final = "x-gateway-destination-endpoint-served"
SUBSET_KEY: Final = "x-gateway-destination-endpoint-subset"
REQUEST_ID_KEY: Final = "id"

# Custom tags of an access log entry. All are strings; one whose value Envoy does not have is left out.
TAG_REQUEST_ID: Final = "id"
TAG_TTFT_US: Final = "ttft_us"
TAG_TOTAL_US: Final = "total_us"
TAG_FLAGS: Final = "flags"
TAG_ENDPOINT: Final = "endpoint"
TAG_PROMPT_TOKENS: Final = "prompt_tokens"
TAG_COMPLETION_TOKENS: Final = "completion_tokens"
TAG_CACHED_TOKENS: Final = "cached_tokens"

# gRPC services the router offers to Envoy, and the one method Envoy calls of each.
EXT_PROC_SERVICE: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
EXT_PROC_METHOD: Final = "Process"
ACCESS_LOG_SERVICE: Final = "envoy.service.accesslog.v3.AccessLogService"
ACCESS_LOG_METHOD: Final = "StreamAccessLogs"
EDS_SERVICE: Final = "envoy.service.endpoint.v3.EndpointDiscoveryService"
EDS_METHOD: Final = "StreamEndpoints"
ADS_SERVICE: Final = "envoy.service.discovery.v3.AggregatedDiscoveryService"
ADS_METHOD: Final = "StreamAggregatedResources"

# What is asked for by discovery, the name of the one route configuration, and what an Envoy that asks for pools says of
# itself in its node's metadata: how long it lets a router hold a request.
CLUSTER_TYPE: Final = "type.googleapis.com/envoy.config.cluster.v3.Cluster"
ROUTE_CONFIGURATION_TYPE: Final = "type.googleapis.com/envoy.config.route.v3.RouteConfiguration"
ROUTES: Final = "pools"
LONGEST_WAIT_KEY: Final = "dualmap_longest_wait_s"
CLUSTER_LOAD_ASSIGNMENT_TYPE: Final = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment"

# The gRPC service the router offers to KEDA (PROTOCOLS section 4).
SCALER_SERVICE: Final = "externalscaler.ExternalScaler"


def cluster_name(namespace: str, name: str) -> str:
    """Name a pool's Envoy cluster, which is also its EDS resource and the value of CLUSTER_HEADER.

    The slash keeps it apart from Envoy's other clusters, whose names have none.
    """
    return f"{namespace}/{name}"
