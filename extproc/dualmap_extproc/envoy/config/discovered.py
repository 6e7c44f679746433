"""Makes the clusters and routes that a router serves by discovery, as bytes.

The bootstrap's own functions make them, so that Envoy gets the same configuration of a pool either way.
"""

from collections.abc import Iterable

from dualmap_extproc.envoy.config.clusters import pool_cluster
from dualmap_extproc.envoy.config.http.listeners import routes
from dualmap_extproc.envoy.config.sources import shared_stream
from dualmap_extproc.wire import discovery_pb2


class Written:
    """Makes clusters and routes; it makes the parts that all pools share once."""

    def __init__(self) -> None:
        self._nameless = bytes(pool_cluster("", endpoints=shared_stream()))

    def clusters(self, names: Iterable[str]) -> dict[str, bytes]:
        """Return a serialized cluster for each name.

        Serializing one with Envoy's typed classes takes 8 ms. So each is a cluster with only the name, followed by the
        shared cluster without a name: protobuf merges concatenated messages.
        """
        return {name: discovery_pb2.Cluster(name=name).SerializeToString() + self._nameless for name in names}

    def routes(self, unpicked: str | None) -> bytes:
        """Return the serialized routes; requests without a pick go to ``unpicked`` (None: they are rejected)."""
        return bytes(routes(unpicked=unpicked))
