"""Workload: the children of a pool with a pod template, and checks of that template. Pure.

This package may import the standard library, the core, ``decide.spec``, ``decide.observed``, ``names`` and ``errors``.
"""
