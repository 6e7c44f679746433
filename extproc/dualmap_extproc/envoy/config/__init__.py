"""Generates Envoy's configuration: the static bootstrap, and the resources for discovery.

Only this package imports Envoy's typed configuration (envoy_data_plane). This package may import the router's packages
below ``request``.
"""
