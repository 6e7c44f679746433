"""The router's gRPC transport: servers and ports, TLS, the ext_proc service, and deadlines.

This package does the I/O and reads the clock for ``request``. This package may import ``request`` and the packages
below ``request``.
"""
