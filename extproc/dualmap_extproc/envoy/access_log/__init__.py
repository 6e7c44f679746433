"""Envoy's access log: the gRPC service (``sink``), and the parser of its entries (``entry``, without gRPC).

This package may import ``request`` (how requests ended) and the packages below ``request``.
"""
