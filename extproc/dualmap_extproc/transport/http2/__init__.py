"""An HTTP/2 and gRPC server without I/O: bytes in, callbacks and bytes out, the time as an argument.

The asyncio adapter owns sockets, TLS and timers. This package imports only the standard library: no clock, no socket,
no event loop, no gRPC and no protobuf. Sources: RFC 9113 (HTTP/2), RFC 7541 (HPACK), and gRPC's PROTOCOL-HTTP2.
"""
