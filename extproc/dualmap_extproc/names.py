"""Names that Envoy's configuration and the router must agree on: headers, metadata, tags, gRPC paths.

``envoy/`` writes them into Envoy's configuration; the stream state machine, the access log sink and the EDS server read
and send them. The ``x-gateway-*`` and ``envoy.lb`` names come from the Gateway API Inference Extension (proposal 004,
"Endpoint Picker Protocol"), those with ``dualmap`` are this project's.
"""

from typing import Final

# Request headers. The router removes all headers with a reserved prefix from clients' requests.
DESTINATION_HEADER: Final = "x-gateway-destination-endpoint"
CLUSTER_HEADER: Final = "x-dualmap-cluster"
NO_RETRY_HEADER: Final = "x-dualmap-no-retry"
RESERVED_HEADER_PREFIXES: Final = ("x-gateway-destination-endpoint", "x-dualmap-")

# Response header with the receipt of the decision (an RFC 9651 dictionary).
DECISION_HEADER: Final = "x-dualmap-decision"

# Dynamic metadata: the two namespaces of the protocol and the router's own, with the keys used in each.
LB_NAMESPACE: Final = "envoy.lb"
SUBSET_NAMESPACE: Final = "envoy.lb.subset_hint"
DUALMAP_NAMESPACE: Final = "dualmap"
USAGE_NAMESPACE: Final = "dualmap.usage"
DESTINATION_KEY: Final = "x-gateway-destination-endpoint"
SERVED_KEY: Final = "x-gateway-destination-endpoint-served"
SUBSET_KEY: Final = "x-gateway-destination-endpoint-subset"
REQUEST_ID_KEY: Final = "id"

# Custom tags of an access log entry. All are strings; Envoy leaves out a tag without a value.
TAG_REQUEST_ID: Final = "id"
TAG_TTFT_US: Final = "ttft_us"
TAG_TOTAL_US: Final = "total_us"
TAG_FLAGS: Final = "flags"
TAG_ENDPOINT: Final = "endpoint"
TAG_PROMPT_TOKENS: Final = "prompt_tokens"
TAG_COMPLETION_TOKENS: Final = "completion_tokens"
TAG_CACHED_TOKENS: Final = "cached_tokens"

# gRPC services that the router offers to Envoy, and the one method that Envoy calls in each.
EXT_PROC_SERVICE: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
EXT_PROC_METHOD: Final = "Process"
ACCESS_LOG_SERVICE: Final = "envoy.service.accesslog.v3.AccessLogService"
ACCESS_LOG_METHOD: Final = "StreamAccessLogs"
EDS_SERVICE: Final = "envoy.service.endpoint.v3.EndpointDiscoveryService"
EDS_METHOD: Final = "StreamEndpoints"
ADS_SERVICE: Final = "envoy.service.discovery.v3.AggregatedDiscoveryService"
ADS_METHOD: Final = "StreamAggregatedResources"

# Resource types of discovery, the name of the one route configuration, and a key of Envoy's node metadata: the longest
# that this Envoy lets a router queue a request.
CLUSTER_TYPE: Final = "type.googleapis.com/envoy.config.cluster.v3.Cluster"
ROUTE_CONFIGURATION_TYPE: Final = "type.googleapis.com/envoy.config.route.v3.RouteConfiguration"
ROUTES: Final = "pools"
LONGEST_WAIT_KEY: Final = "dualmap_longest_wait_s"
CLUSTER_LOAD_ASSIGNMENT_TYPE: Final = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment"

# The gRPC service that the router offers to KEDA (its external scaler API).
SCALER_SERVICE: Final = "externalscaler.ExternalScaler"


def cluster_name(namespace: str, name: str) -> str:
    """Return the name of a pool's Envoy cluster, which is also its EDS resource and the value of CLUSTER_HEADER.

    Only pools' clusters have a slash in their names.
    """
    return f"{namespace}/{name}"
