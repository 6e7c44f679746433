"""Makes the serialized clusters that a router serves to Envoy by discovery.

The clusters of all pools differ only in their names. The file pool_cluster.binpb contains the other fields, serialized
by ``make proto`` from ``envoy.config.clusters``. A router therefore answers Envoy's first request at once. With Envoy's
typed classes, the first answer would need an import of more than a second, and on a busy machine it would come after
Envoy has opened its listener without clusters.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from dualmap_extproc.wire import discovery_pb2

_OTHER_FIELDS: Final = (Path(__file__).parent / "pool_cluster.binpb").read_bytes()


def clusters_of(names: Iterable[str]) -> dict[str, bytes]:
    """Return a serialized cluster for each name. Protobuf merges concatenated messages."""
    return {name: discovery_pb2.Cluster(name=name).SerializeToString() + _OTHER_FIELDS for name in names}
