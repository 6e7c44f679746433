"""Waits for what another process does; the same function as in the tests of the emulated cluster."""

from emulated_cluster.waiting import until

__all__ = ["until"]
