"""The commands ``router``, ``explain`` and ``envoy-config``, the start of the router, and the use of new pool versions.

This package may import every other package of the router. No other package imports this package.
"""
