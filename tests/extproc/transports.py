"""Both transports of the gRPC port, for tests: a fixture that selects one, and a server of any gRPC services on it."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import grpc
import pytest

from dualmap_extproc.settings import Transport
from dualmap_extproc.transport.grpc_server import GrpcServer
from dualmap_extproc.transport.http2.limits import Http2Limits
from dualmap_extproc.transport.http2_server import Http2Server
from dualmap_extproc.transport.http2_services import Methods
from dualmap_extproc.transport.server import Server

_selected: list[Transport] = ["h2"]


def selected() -> Transport:
    """Return the transport that the test uses."""
    return _selected[-1]


@pytest.fixture(params=["grpc", "h2"])
def transport(request):
    """Run a test once with each transport: in the servers of this module and of the routers of tests."""
    _selected.append(request.param)
    yield request.param
    _selected.pop()


def server(handlers: Sequence[grpc.GenericRpcHandler]) -> Server:
    """Return a server of the services on the selected transport."""
    if selected() == "h2":
        return Http2Server(lambda client: Methods({}, handlers, client), Http2Limits())
    return GrpcServer(handlers, message_bytes=4 * 1024 * 1024)


@asynccontextmanager
async def serving(handlers: Sequence[grpc.GenericRpcHandler]) -> AsyncIterator[int]:
    """Serve the services on a free port; yield the port."""
    serving = server(handlers)
    port = await serving.bind("127.0.0.1", 0, None)
    await serving.start()
    try:
        yield port
    finally:
        await serving.close()
