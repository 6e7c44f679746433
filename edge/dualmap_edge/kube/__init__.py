"""Kubernetes API access: connection (``library``), requests and watches (``client``), list-watch loop (``watch``).

May import the core's readers of Kubernetes objects, never its routing state; aiohttp, and the kubernetes library
(``library`` only).
"""
