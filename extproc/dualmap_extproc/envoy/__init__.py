"""The router's interfaces to Envoy beside ext_proc: generated configuration, discovery, and the access log.

This package may import the packages below ``request``. Only ``access_log`` may import ``request``, and only the gRPC
services may import gRPC.
"""
