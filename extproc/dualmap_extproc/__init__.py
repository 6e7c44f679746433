"""The data path: an Envoy ext_proc endpoint picker, its endpoint discovery, access-log sink and metrics."""
