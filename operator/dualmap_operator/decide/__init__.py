"""Decide: one reconcile's decision as a pure function of the spec, the observed state and the time.

This package may import ``dualmap`` (the core), ``names`` and ``errors``. The package uses no clock, no I/O and no
Kubernetes library, directly or indirectly.
"""
