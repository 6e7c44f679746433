"""What the emulated components share as clients of the API server: a client, its retries, and following a collection.

May import: aiohttp; no other package of the emulated cluster.
"""
