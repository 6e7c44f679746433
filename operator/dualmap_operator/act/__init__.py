"""Act: carries out plans by writing to the API server: children, status, readiness gates, pod deletions, Events.

May import ``observe``, ``api``, ``decide`` and below; it never asks routers or engines itself.
"""
