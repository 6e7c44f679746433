"""Generates Envoy's configuration: the static bootstrap, and the resources for discovery.

Only this package imports Envoy's typed configuration (envoy_data_plane). It may import the packages below ``request``.
"""
