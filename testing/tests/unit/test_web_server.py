"""Tests of the HTTP server that other tests use."""

import asyncio
import contextlib
import gc
import socket
import warnings

import pytest
from aiohttp import web

from web_server import WebServer


@pytest.mark.parametrize("iterations", range(6))
async def test_stopped_web_server_leaves_no_accepted_connection_open(iterations: int) -> None:
    server = WebServer(web.Application())
    await server.start()
    # The kernel establishes the connection before the server accepts it.
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for _ in range(iterations):
                await asyncio.sleep(0)
            await server.stop()
            gc.collect()
        assert [str(each.message) for each in said] == []
        client.setblocking(False)
        await closed(client)


async def test_stopped_web_server_frees_its_port() -> None:
    first = WebServer(web.Application())
    async with first:
        pass
    async with WebServer(web.Application(), port=first.port) as second:
        assert second.port == first.port


async def closed(client: socket.socket) -> None:
    """Wait until the server has closed or reset the connection."""
    with contextlib.suppress(ConnectionResetError):
        assert await asyncio.wait_for(asyncio.get_running_loop().sock_recv(client, 1), 10.0) == b""
