"""The gRPC side of the router: servers and ports, TLS, the ext_proc service, deadlines.

It does the I/O and reads the clock for ``request``. It may import ``request`` and the rooms below it.
"""
