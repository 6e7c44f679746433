"""Generates Envoy's configuration: static bootstrap, or resources for discovery.

The only room that imports Envoy's typed configuration (envoy_data_plane). Of the router it may import only
the rooms below ``request``.
"""
