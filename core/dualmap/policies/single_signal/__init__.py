"""Baselines that use the cache alone, the load alone, or neither.

May import what ``policies`` may, ``situation`` and ``migration``; neither ``pair`` nor ``cache_and_load``.
"""
