"""The clusters and routes that an Envoy in front of pools made later asks of a router, as bytes for ``discovery``.

By the functions that write the bootstrap's own, so that a pool is the same to Envoy whichever way it came.
"""

from collections.abc import Iterable

from dualmap_extproc.envoy.config.clusters import pool_cluster
from dualmap_extproc.envoy.config.http.listeners import routes
from dualmap_extproc.envoy.config.sources import shared_stream
from dualmap_extproc.wire import discovery_pb2


class Written:
    """Writes them; the parts that all pools share once."""

    def __init__(self) -> None:
        self._nameless = bytes(pool_cluster("", endpoints=shared_stream()))

    def clusters(self, names: Iterable[str]) -> dict[str, bytes]:
        """Return a cluster for each of the names.

        Writing one takes Envoy's typed classes 8 ms, so a pool's is the one without a name and that name: protobuf
        messages are merged by writing one after the other.
        """
        return {name: discovery_pb2.Cluster(name=name).SerializeToString() + self._nameless for name in names}

    def routes(self, unpicked: str | None) -> bytes:
        """Return the route configuration in which ``unpicked`` takes what no router picked (None: nobody)."""
        return bytes(routes(unpicked=unpicked))
