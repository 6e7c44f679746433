"""Envoy's discovery services (xDS): endpoints, clusters and routes of the pools, pushed as they change.

May import ``envoy.config`` and ``wire``; gRPC in ``service`` only.
"""
