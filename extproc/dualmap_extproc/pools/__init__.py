"""Sources of pools: files that are watched, or InferencePool objects and pods of the Kubernetes API.

May import ``dualmap_edge`` and YAML; of the router only the rooms below ``request``.
"""
