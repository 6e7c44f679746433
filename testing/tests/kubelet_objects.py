"""A pod for the kubelet's unit tests, which run without an API server."""

from typing import Any


def pod(**spec: Any) -> dict[str, Any]:
    return {
        "metadata": {
            "name": "chat-0",
            "namespace": "team",
            "uid": "0f1e2d3c-0000",
            "generation": 3,
            "labels": {"apps.kubernetes.io/pod-index": "0"},
        },
        "spec": {"nodeName": "node-0", "containers": [{"name": "engine"}], **spec},
    }
