"""Baseline policies that use only the cache, only the load, or neither.

This package may import ``situation``, ``migration`` and the packages that ``policies`` may import, but not ``pair`` or
``cache_and_load``.
"""
