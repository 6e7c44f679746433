"""A client in a process of its own that sends hostile bodies: ``python attackers.py PORT STREAMS SIZE``.

Each stream sends its body again and again, in the pieces in which Envoy sends bodies, until the process ends. The
process writes a line for each answer.
"""

import asyncio
import sys

import grpc.aio

from dualmap_extproc.names import EXT_PROC_METHOD, EXT_PROC_SERVICE
from dualmap_extproc.wire import ext_proc_pb2 as wire

PIECE_BYTES = 65_536


def numbers(size: int) -> bytes:
    return b'{"model":"m","messages":[],"tools":[' + b"1," * (size // 2 - 30) + b"1]}"


def messages(body: bytes) -> list[bytes]:
    head = wire.ProcessingRequest(request_headers=wire.HttpHeaders())
    head.protocol_config.request_body_mode = wire.STREAMED
    head.protocol_config.send_body_without_waiting_for_header_response = True
    for key, value in ((":method", b"POST"), (":path", b"/v1/chat/completions")):
        head.request_headers.headers.headers.add(key=key, raw_value=value)
    pieces = [body[start : start + PIECE_BYTES] for start in range(0, len(body), PIECE_BYTES)]
    bodies = [wire.HttpBody(body=piece, end_of_stream=piece is pieces[-1]) for piece in pieces]
    return [each.SerializeToString() for each in (head, *(wire.ProcessingRequest(request_body=b) for b in bodies))]


async def attack(channel: grpc.aio.Channel, sent: list[bytes]) -> None:
    method = channel.stream_stream(f"/{EXT_PROC_SERVICE}/{EXT_PROC_METHOD}")
    while True:
        call = method()
        try:
            for message in sent:
                await call.write(message)
            answer = wire.ProcessingResponse.FromString(await call.read())
        except (grpc.RpcError, asyncio.InvalidStateError):
            continue
        finally:
            call.cancel()
        print(answer.immediate_response.status.code, flush=True)


async def main(port: str, streams: str, size: str) -> None:
    sent = messages(numbers(int(size)))
    channels = [grpc.aio.insecure_channel(f"127.0.0.1:{port}") for _ in range(int(streams))]
    await asyncio.gather(*(attack(channel, sent) for channel in channels))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
