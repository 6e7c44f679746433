"""The API server's client for the emulated components: requests, retries, and a list-watch loop.

May import: aiohttp, and in ``follow`` the product's list-watch loop (``dualmap_edge.kube``); no other package of the
emulated cluster.
"""
