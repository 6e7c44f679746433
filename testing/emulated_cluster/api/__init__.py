"""What the emulated parts share as clients of the API server: which errors pass, and following a collection.

May import: aiohttp, and in ``follow`` the product's list-watch loop (``dualmap_edge.kube``); nothing of the
other rooms.
"""
