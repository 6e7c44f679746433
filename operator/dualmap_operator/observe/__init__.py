"""Observe: what the API server, the routers and the engines report, gathered for one reconcile.

May import ``api``, ``decide`` (never its ``plan``), aiohttp for HTTP requests, and ``dualmap_edge`` for
the Kubernetes client.
"""
