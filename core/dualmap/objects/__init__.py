"""Kubernetes objects to values: InferencePools and pods, as the router and the operator both read them.

May import ``dualmap.errors``, ``dualmap.pools`` and policies (their registry); no other module of the core imports it.
No I/O: bodies arrive already parsed.
"""
