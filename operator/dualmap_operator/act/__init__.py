"""Act: carries out plans by writes to the API server: children, status, readiness gates, pod deletions and Events.

This package may import ``observe``, ``api``, ``decide`` and lower layers. The package sends no requests to routers or
engines.
"""
