"""The command line, the start of the router from its components, the adoption of pools, and ``explain``.

This package may import every other package of the router. No other package imports it.
"""
