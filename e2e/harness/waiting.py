"""Polls for the effect of another process, with the function of the emulated cluster."""

from emulated_cluster.waiting import until

__all__ = ["until"]
