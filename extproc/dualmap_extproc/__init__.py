"""The router: an Envoy endpoint picker (ext_proc) over one or more pools.

The levels of modules and subpackages, from top to bottom, are: app; epp; transport, telemetry, envoy, store, peers,
pools, reading, engines, kv_stores, recording; tokens; autoscaling; request; wire, settings, errors; names. Each of them
imports only from lower levels. Import contracts in pyproject.toml enforce these and further rules.
"""
