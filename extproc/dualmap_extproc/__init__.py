"""The router: an Envoy endpoint picker (ext_proc) over one or more pools.

Rooms import downwards only: app; transport, telemetry, envoy, store, pools; autoscaling; request; wire, settings,
errors; names. Only app and telemetry import autoscaling. Import contracts in pyproject.toml enforce this.
"""
