"""Polls for the effect of another process; the function of the emulated cluster's tests."""

from emulated_cluster.waiting import until

__all__ = ["until"]
