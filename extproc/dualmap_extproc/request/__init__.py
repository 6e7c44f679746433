"""The processing of one request: from ext_proc messages to the picker's decision, the answers and the request's end.

This package does no I/O and reads no clock. This package may import ``wire``, ``errors``, ``names``, ``settings``, the
core and ``dualmap_edge.logs``.
"""
