"""Envoy's discovery services (xDS): endpoints, clusters and routes of the pools, pushed as they change.

May import ``envoy.config`` and the rooms below ``request``; gRPC in ``service`` only.
"""
