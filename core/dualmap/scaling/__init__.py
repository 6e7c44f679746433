"""Computes the number of members that a pool's traffic needs: one router's share, and the sum over all routers.

This package may import fleet (for the prefill model) and lower layers, but not queue. No other package of the core
imports this package.
"""
