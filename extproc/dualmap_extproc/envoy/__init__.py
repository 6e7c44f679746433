"""What the router serves to Envoy beside ext_proc: generated configuration, discovery, and the access log.

May import the rooms below ``request``, and ``request`` in ``access_log`` only; gRPC in the servicers only.
"""
