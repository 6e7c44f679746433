"""Decide: one reconcile's decision as a pure function of the spec, the observed state and the time.

May import ``dualmap`` (the core), ``names`` and ``errors``. No clock, no I/O, no Kubernetes library, also indirectly.
"""
