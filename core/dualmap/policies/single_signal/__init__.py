"""Baselines that use the cache alone, the load alone, or neither.

May import policies and keys.
"""
