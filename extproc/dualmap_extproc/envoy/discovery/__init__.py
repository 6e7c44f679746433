"""Envoy's discovery services (xDS): push the endpoints, clusters and routes of the pools after each change.

This package may import ``envoy.config`` and the packages below ``request``. Only ``service`` may import gRPC.
"""
