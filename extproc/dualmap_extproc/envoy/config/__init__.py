"""Generates Envoy's configuration: static bootstrap, or resources for discovery.

The only room that imports Envoy's typed configuration (envoy_data_plane). May import no other room but ``wire``.
"""
