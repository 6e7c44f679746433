"""Composition: the command line, the wiring of all parts, the adoption of pools, and ``explain``.

May import every other room. No other room imports this one.
"""
