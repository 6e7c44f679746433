"""What the kubelet's parts share in talking to the API server, beside ``dualmap_edge.kube``: patches and patience."""

from typing import Final

from dualmap_edge.kube import KubeError

STRATEGIC_MERGE: Final = "application/strategic-merge-patch+json"
MERGE: Final = "application/merge-patch+json"
NOT_FOUND: Final = 404
CONFLICT: Final = 409
RETRY_S: Final = 0.3
_TOO_MANY_REQUESTS: Final = 429


def passing(error: KubeError) -> bool:
    """Whether a request that failed so may succeed later: the server was away or busy, or somebody else wrote."""
    return error.status in {0, CONFLICT, _TOO_MANY_REQUESTS} or error.status >= 500
