"""Kubernetes API access: connection (``library``), requests and watches (``client``), list-watch loop (``watch``).

May import the core's readers of Kubernetes objects, aiohttp, and the kubernetes library (``library`` only).
"""
