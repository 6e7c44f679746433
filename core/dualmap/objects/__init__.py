"""Kubernetes objects to values: InferencePools and pods, as the router and the operator both read them.

May import ``dualmap.errors``, ``dualmap.pools`` and the registry of policies. No I/O: bodies arrive already parsed.
"""
