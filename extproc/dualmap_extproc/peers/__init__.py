"""The connections to the other routers: messages about requests, access log entries and shared state.

``Peers`` keeps one gRPC stream with each other router. This package may import ``request`` (access log entries) and the
packages below ``request``.
"""
