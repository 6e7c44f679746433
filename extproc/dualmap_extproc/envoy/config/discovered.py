"""Makes the serialized clusters and routes that a router serves to Envoy by discovery.

The functions that make the bootstrap also make these resources. Envoy therefore gets the same configuration from the
bootstrap and from discovery.
"""

from collections.abc import Iterable

from dualmap_extproc.envoy.config.clusters import pool_cluster
from dualmap_extproc.envoy.config.http.listeners import routes
from dualmap_extproc.envoy.config.sources import shared_stream
from dualmap_extproc.wire import discovery_pb2


class Written:
    """A factory for clusters and routes. The factory serializes the fields shared by all pools' clusters only once."""

    def __init__(self) -> None:
        self._nameless = bytes(pool_cluster("", endpoints=shared_stream()))

    def clusters(self, names: Iterable[str]) -> dict[str, bytes]:
        """Return a serialized cluster for each name.

        The serialization of a cluster with Envoy's typed classes takes 8 ms. This method therefore concatenates two
        messages: a cluster with only the name, and the shared cluster without a name. Protobuf merges concatenated
        messages.
        """
        return {name: discovery_pb2.Cluster(name=name).SerializeToString() + self._nameless for name in names}

    def routes(self, unpicked: str | None) -> bytes:
        """Return the serialized routes. Requests without a pick go to ``unpicked``, or are rejected if it is None."""
        return bytes(routes(unpicked=unpicked))
