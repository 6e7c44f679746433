"""Names that Envoy's configuration and the router share: headers, metadata, tags, gRPC paths.

``envoy/config`` writes these names into Envoy's configuration. The stream's state machine, the access log sink and the
discovery service read and send them. The ``x-gateway-*`` and ``envoy.lb`` names come from the Gateway API Inference
Extension (proposal 004, "Endpoint Picker Protocol"). Names with ``dualmap`` are specific to this project.
"""

from typing import Final

# Names of request headers. The router removes all headers with a reserved prefix from clients' requests. Besides the
# router's own headers, these select members for a part of a request in llm-d's sidecar and vLLM (`x-prefiller-...`,
# `x-decoder-...`, `x-encoder-...`, `x-data-parallel-...`, `x-kv-cache-source-...`) and in NVIDIA Dynamo (the others).
DESTINATION_HEADER: Final = "x-gateway-destination-endpoint"
CLUSTER_HEADER: Final = "x-dualmap-cluster"
NO_RETRY_HEADER: Final = "x-dualmap-no-retry"
PREFILLER_HEADER: Final = "x-prefiller-host-port"
PREFILLERS_HEADER: Final = "x-dualmap-prefillers"
CONTINUE_HEADER: Final = "x-dualmap-continue"
KV_SOURCE_HEADER: Final = "x-kv-cache-source-host-port"
RESERVED_HEADER_PREFIXES: Final = (
    "x-gateway-destination-endpoint",
    "x-dualmap-",
    "x-prefill",
    "x-data-parallel-",
    "x-decoder-",
    "x-encoder-",
    "x-kv-cache-source-",
    "x-worker-instance-id",
    "x-dp-rank",
    "x-dynamo-routing-mode",
)

# The header in which an authenticating gateway names the client of a request (Gateway API Inference Extension).
FAIRNESS_HEADER: Final = "x-gateway-inference-fairness-id"

# The header in which a client or gateway names the objective of a request, which has a priority (the same project).
OBJECTIVE_HEADER: Final = "x-gateway-inference-objective"

# Headers of the conformance tests of the same project: the endpoints that the client chooses, the header that the
# server of the tests sets on its response, and the endpoint that served the request.
SELECTION_HEADER: Final = "test-epp-endpoint-selection"
ECHO_HEADER: Final = "x-echo-set-header"
SERVED_HEADER: Final = "x-conformance-test-served-endpoint"

# Response header with the receipt of the decision (an RFC 9651 dictionary).
DECISION_HEADER: Final = "x-dualmap-decision"

# Dynamic metadata: two namespaces of the endpoint picker protocol, two namespaces of the router, and their keys.
LB_NAMESPACE: Final = "envoy.lb"
SUBSET_NAMESPACE: Final = "envoy.lb.subset_hint"
DUALMAP_NAMESPACE: Final = "dualmap"
USAGE_NAMESPACE: Final = "dualmap.usage"
DESTINATION_KEY: Final = "x-gateway-destination-endpoint"
SERVED_KEY: Final = "x-gateway-destination-endpoint-served"
SUBSET_KEY: Final = "x-gateway-destination-endpoint-subset"
REQUEST_ID_KEY: Final = "id"

# Custom tags of an access log entry. All values are strings; Envoy leaves out a tag without a value.
TAG_REQUEST_ID: Final = "id"
TAG_TTFT_US: Final = "ttft_us"
TAG_TOTAL_US: Final = "total_us"
TAG_FLAGS: Final = "flags"
TAG_ENDPOINT: Final = "endpoint"
TAG_PROMPT_TOKENS: Final = "prompt_tokens"
TAG_COMPLETION_TOKENS: Final = "completion_tokens"
TAG_CACHED_TOKENS: Final = "cached_tokens"

# The names of Envoy's access logs. Every sink gets all entries of the first log. Of several routers, one gets an entry
# of the shared log, and sends it to the router that picked the request's member.
ACCESS_LOG: Final = "dualmap"
SHARED_ACCESS_LOG: Final = "dualmap-shared"

# The gRPC services that the router offers to Envoy, and the method that Envoy calls in each service.
EXT_PROC_SERVICE: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
EXT_PROC_METHOD: Final = "Process"
ACCESS_LOG_SERVICE: Final = "envoy.service.accesslog.v3.AccessLogService"
ACCESS_LOG_METHOD: Final = "StreamAccessLogs"
EDS_SERVICE: Final = "envoy.service.endpoint.v3.EndpointDiscoveryService"
EDS_METHOD: Final = "StreamEndpoints"
ADS_SERVICE: Final = "envoy.service.discovery.v3.AggregatedDiscoveryService"
ADS_METHOD: Final = "StreamAggregatedResources"

# Resource types of discovery, and a key of Envoy's node metadata. The value of the key is the longest time that this
# Envoy lets a router queue a request.
CLUSTER_TYPE: Final = "type.googleapis.com/envoy.config.cluster.v3.Cluster"
LONGEST_WAIT_KEY: Final = "dualmap_longest_wait_s"
CLUSTER_LOAD_ASSIGNMENT_TYPE: Final = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment"

# The name of the discovered endpoints for requests without a pick: the members of the only pool, or none.
ONLY_POOL: Final = "dualmap-only-pool"

# The gRPC service that the router offers to KEDA (its external scaler API).
SCALER_SERVICE: Final = "externalscaler.ExternalScaler"


def replica_of(router: str) -> str:
    """Return the replica id in a router's name among the routers, which ends with a random number."""
    return router.rpartition("-")[0]


def cluster_name(namespace: str, name: str) -> str:
    """Return the name of a pool's Envoy cluster, which is also its EDS resource and the value of CLUSTER_HEADER.

    Only the names of pools' clusters contain a slash.
    """
    return f"{namespace}/{name}"
