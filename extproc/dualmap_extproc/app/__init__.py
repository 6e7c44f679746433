"""The commands of the router, such as ``router``, ``epp`` and ``explain``, its start, and the use of new pool versions.

This package may import every other package of the router. No other package imports this package.
"""
