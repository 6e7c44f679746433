"""Writes the fields that the clusters of all pools have in common: ``make proto`` runs this script.

The router's discovery service sends these fields to Envoy (``dualmap_extproc.envoy.discovery.clusters``).
"""

from pathlib import Path

from dualmap_extproc.envoy.config.clusters import pool_cluster
from dualmap_extproc.envoy.config.sources import shared_stream

FILE = Path(__file__).parents[1] / "dualmap_extproc" / "envoy" / "discovery" / "pool_cluster.binpb"


def main() -> None:
    """Write the file."""
    FILE.write_bytes(bytes(pool_cluster("", endpoints=shared_stream())))


if __name__ == "__main__":
    main()
