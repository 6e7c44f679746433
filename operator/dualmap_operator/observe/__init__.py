"""Observe: collects the reports of the API server, the routers and the engines for one reconcile.

This package may import ``api``, ``decide`` except ``decide.plan``, aiohttp for HTTP requests, and ``dualmap_edge`` for
the Kubernetes client.
"""
