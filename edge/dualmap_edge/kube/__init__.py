"""Kubernetes API access: the connection (``library``), requests (``client``) and the list-watch loop (``watch``).

This package may import aiohttp and the core's readers of Kubernetes objects, but not the core's routing state. Only
``library`` may import the kubernetes library.
"""
