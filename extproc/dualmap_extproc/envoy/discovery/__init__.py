"""Envoy's discovery services (xDS): push the endpoints and clusters of the pools after each change.

This package may import the packages below ``request``. Only ``service`` may import gRPC.
"""
