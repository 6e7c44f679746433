"""Clients that send bodies of numbers in a loop: ``python -m bench.hostile.attackers PORT CONNECTIONS DIGITS``.

Each body has ``BODY_BYTES`` bytes; its numbers have DIGITS digits. The process writes a line for each answer.
"""

import asyncio
import sys

from bench.gateway.prompts import MODEL

BODY_BYTES = 16_000_000


def body_of(digits: int) -> bytes:
    """Return a chat body whose ``tools`` are numbers."""
    head, tail = b'{"model": "%s", "messages": [], "tools": [' % MODEL.encode(), b"0]}"
    number = b"1" * digits + b","
    numbers = number * ((BODY_BYTES - len(head) - len(tail)) // len(number))
    return head + numbers + tail


async def attack(port: int, body: bytes) -> None:
    """Send a body again and again, on one connection while Envoy keeps the connection open."""
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
    request = head + b"content-length: %d\r\n\r\n" % len(body) + body
    while True:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            while not writer.is_closing():
                writer.write(request)
                answer = await reader.readuntil(b"\r\n\r\n")
                print(answer[9:12].decode(), flush=True)
                lines = dict(line.lower().split(b": ", 1) for line in answer.split(b"\r\n")[1:] if line)
                await reader.readexactly(int(lines[b"content-length"]))
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


async def main(port: int, connections: int, digits: int) -> None:
    """Attack until the process is killed."""
    body = body_of(digits)
    await asyncio.gather(*(attack(port, body) for _ in range(connections)))


if __name__ == "__main__":
    asyncio.run(main(*map(int, sys.argv[1:])))
