"""Envoy's bootstrap for a stand-alone Envoy in front of pools, made from envoy_data_plane's typed messages."""
