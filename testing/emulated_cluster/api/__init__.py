"""What the emulated components share as clients of the API server: a client, its retries, and following a collection.

May import: aiohttp, and in ``follow`` the product's list-watch loop (``dualmap_edge.kube``); nothing of the
other rooms.
"""
