"""The HTTP part of Envoy's configuration: listeners, filters, replies, access log, and token usage (Lua).

May import ``envoy.config`` and what that may import.
"""
