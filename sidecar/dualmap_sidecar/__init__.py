"""The sidecar of a decode engine: an HTTP proxy that has prompts prefilled by other engines.

The package may import core, edge, and ``dualmap_extproc.pools``, which reads pool files and watches pools.
"""
