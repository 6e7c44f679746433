"""The HTTP part of Envoy's configuration: listeners, filters, replies, access log, and token usage (Lua).

This package may import ``envoy.config``, and the packages that ``envoy.config`` may import.
"""
