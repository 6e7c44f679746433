"""Converts Kubernetes objects (InferencePools, pods, reserved model names) into values for router and operator.

This package may import ``dualmap.errors``, ``dualmap.pools`` and the registry of policies. No other package of the core
imports this package. The package has no I/O: callers pass parsed objects.
"""
