"""Sources of pools: watched files, or InferencePool objects and pods of the Kubernetes API.

This package may import ``dualmap_edge``, YAML, and the router's packages below ``request``.
"""
