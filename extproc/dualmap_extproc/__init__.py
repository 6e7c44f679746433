"""The router: an Envoy endpoint picker (ext_proc) over one or more pools.

The levels of modules and subpackages, from top to bottom, are: app; transport, telemetry, envoy, store, pools;
autoscaling; request; wire, settings, errors; names. Each of them imports only from lower levels. Only app and telemetry
import autoscaling. Import contracts in pyproject.toml enforce these rules.
"""
