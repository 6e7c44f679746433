"""What the emulated parts share as clients of the API server: which errors pass, and following a collection.

May import: aiohttp, nothing of the other rooms.
"""
