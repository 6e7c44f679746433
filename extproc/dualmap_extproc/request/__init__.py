"""The way of one request: ext_proc messages in, the picker's decision, answers out, how the request ended.

It does no I/O and reads no clock. It may import ``wire``, ``errors``, ``names``, ``settings``, the core and
``dualmap_edge.logs``.
"""
