"""Baselines that look at the cache or at the load alone, or at neither.

May import policies and keys.
"""
