"""The trivial picker process: the minimum cost of a grpc.aio picker in Python.

``python -m bench.gateway.trivial DESTINATION CLUSTER`` uses Envoy's no-wait STREAMED mode, like the router. The picker
sends no answer before the body's end, then one answer per message. The picker ends the stream at the first chunk of the
response. With the third argument ``full-duplex``, the picker sends both bodies back. Every answer is built once, at the
start. The picker reads only the kind of each message, and whether the body ends. The picker has no access log, no
endpoint discovery and no metrics. It answers Envoy's health checks.
"""

import asyncio
import sys
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1.health import aio as health_aio  # type: ignore[attr-defined]  # missing in grpc-stubs
from grpc_health.v1.health_pb2 import HealthCheckResponse

from dualmap_extproc.names import EXT_PROC_METHOD, EXT_PROC_SERVICE
from dualmap_extproc.wire import answers
from dualmap_extproc.wire import ext_proc_pb2 as wire
from dualmap_extproc.wire.chunks import echo

_EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]  # grpc-stubs has only the type

# The first byte of a ProcessingRequest in Envoy's encoding: the field number, with the wire type of a message.
_REQUEST_BODY, _RESPONSE_HEADERS, _RESPONSE_BODY = 0x22, 0x1A, 0x2A
# The largest piece of a body that Envoy accepts back.
_PIECE_BYTES = 62_000
# The last bytes of an HttpBody with end_of_stream true. JSON never ends with these control characters.
_END_OF_STREAM = b"\x10\x01"


class Picker:
    """Answers every request with the same destination."""

    def __init__(self, destination: str, cluster: str) -> None:
        plain = answers.PLAIN_REQUEST_HEADERS
        self._pick = answers.with_pick(
            plain, destination=destination, cluster=cluster, request_id="", strip=(), retries=True
        )

    async def echo(self, _: object, context: Any) -> None:
        """Serve one stream in FULL_DUPLEX_STREAMED until Envoy ends it."""
        body = b""
        while (message := await context.read()) is not _EOF:
            kind = message[0]
            if kind == _REQUEST_BODY:
                chunk = wire.ProcessingRequest.FromString(message).request_body
                body += chunk.body
                if chunk.end_of_stream:
                    await context.write(self._pick)
                    for piece in answers.request_pieces(body, _PIECE_BYTES, last=True):
                        await context.write(piece)
            elif kind == _RESPONSE_HEADERS:
                await context.write(answers.PLAIN_RESPONSE_HEADERS)
            elif kind == _RESPONSE_BODY:
                echoed = echo(message)
                assert echoed is not None
                await context.write(echoed[0])

    async def process(self, _: object, context: Any) -> None:
        """Serve one stream."""
        bodies = 0
        while (message := await context.read()) is not _EOF:
            kind = message[0]
            if kind == _REQUEST_BODY:
                bodies += 1
                if _ends(message):
                    await context.write(self._pick)
                    for _body in range(bodies):
                        await context.write(answers.PLAIN_REQUEST_BODY)
            elif kind == _RESPONSE_HEADERS:
                await context.write(answers.PLAIN_RESPONSE_HEADERS)
            elif kind == _RESPONSE_BODY:
                await context.write(answers.PLAIN_RESPONSE_BODY)
                return


def _ends(message: bytes) -> bool:
    """Return whether the message's first field, an HttpBody, ends the stream."""
    size, at, shift = 0, 1, 0
    while True:
        byte = message[at]
        size |= (byte & 0x7F) << shift
        at += 1
        shift += 7
        if byte < 0x80:
            return message[at + size - 2 : at + size] == _END_OF_STREAM


async def main(destination: str, cluster: str, mode: str = "no-wait") -> None:
    """Serve until the process is killed, with the router's own gRPC options."""
    options = {"grpc.max_receive_message_length": -1, "grpc.so_reuseport": 0, "grpc.http2.max_ping_strikes": 0}
    server = grpc.aio.server(options=[*options.items()])
    # Without serializers, gRPC passes bytes in both directions.
    picker = Picker(destination, cluster)
    method = grpc.stream_stream_rpc_method_handler(picker.echo if mode == "full-duplex" else picker.process)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(EXT_PROC_SERVICE, {EXT_PROC_METHOD: method}),)
    )
    health = health_aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    for service in ("", EXT_PROC_SERVICE):
        await health.set(service, HealthCheckResponse.SERVING)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"dualmap bench-trivial ready grpc=127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
