"""The router: an Envoy endpoint picker (ext_proc) over one or more pools.

Rooms import downwards only: app; transport, telemetry, envoy, store, pools; autoscaling; request; wire, settings,
errors; names. An import contract in pyproject.toml orders them.
"""
