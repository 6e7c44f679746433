"""Envoy's access log: the gRPC service (``sink``), and its entries read into values (``entry``, without gRPC).

May import ``request`` (how requests ended) and the rooms below it.
"""
