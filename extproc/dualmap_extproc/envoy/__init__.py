"""What the router serves to Envoy beside ext_proc: generated configuration, discovery, and the access log.

May import ``request`` (how requests ended), ``wire`` and gRPC; gRPC in the servicers only.
"""
