"""The router: an Envoy endpoint picker (ext_proc) over one or more pools.

The subpackages, from top to bottom: app; transport, telemetry, envoy, store, pools; autoscaling; request; wire,
settings, errors; names. A subpackage imports only subpackages of lower levels. Only app and telemetry import
autoscaling. Import contracts in pyproject.toml enforce these rules.
"""
