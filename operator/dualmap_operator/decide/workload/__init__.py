"""Workload: the children of a pool that is made from a pod template, and checks of that template. Pure.

May import the standard library, the core, ``decide.spec``, ``decide.observed``, ``names`` and ``errors``.
"""
