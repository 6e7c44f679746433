"""Converts Kubernetes objects (InferencePools and pods) into values for the router and the operator.

This package may import ``dualmap.errors``, ``dualmap.pools`` and the registry of policies. No other package of the core
imports this package. The package has no I/O: callers pass parsed objects.
"""
