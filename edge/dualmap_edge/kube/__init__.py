"""Access to the Kubernetes API: connection (``library``), requests and watches (``client``), list-watch loop (``watch``).

This package may import aiohttp and the core's readers of Kubernetes objects, but not the core's routing state. Only
``library`` may import the kubernetes library.
"""
