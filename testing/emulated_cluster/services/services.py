"""Names and cluster addresses of Services, which nodes provide in a real cluster.

Runs a DNS server for pods, with the names of ``names.py``, and a proxy for every port of every cluster address. Both
use a watch of the API server. ``netns.sh`` makes the addresses local. ``kubelet/`` configures the name server in its
pods.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Final, Self, cast

from emulated_cluster.api.client import ApiClient
from emulated_cluster.api.follow import Mirror, follow
from emulated_cluster.control_plane.cluster import API_SERVER, Cluster
from emulated_cluster.loop_thread import LoopThread
from emulated_cluster.services.names import SERVICE_LABEL, read_question, resolve, write_answer

Object = Mapping[str, Any]
Address = tuple[str, int]

NAMESERVER: Final = "10.244.255.53"
_DNS_PORT: Final = 53
_SERVICES: Final = "/api/v1/services"
_SLICES: Final = "/apis/discovery.k8s.io/v1/endpointslices"


class Services:
    """A context manager that resolves names of Services and accepts connections at cluster addresses.

    The servers run in their own thread, so a test that blocks its event loop does not stop the traffic.
    """

    nameserver: Final = NAMESERVER

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._thread = LoopThread(self._serve, name="services")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop the servers; raise the thread's error unless the test has already failed."""
        failure = self._thread.stop()
        if error is None and failure is not None:
            raise failure

    @asynccontextmanager
    async def _serve(self) -> AsyncGenerator[None, None]:
        client = self._cluster.client()
        state = _State()
        try:
            async with asyncio.TaskGroup() as tasks:
                following = tasks.create_task(state.follow(client))
                await state.known.wait()
                async with _name_server(state):
                    yield
                following.cancel()
        finally:
            await state.close()
            await client.close()


class _State:
    """The Services and endpoints of the API server, and the proxies for the cluster addresses."""

    def __init__(self) -> None:
        self.known = asyncio.Event()
        self._services: Mapping[str, Object] | None = None
        self._slices: Mapping[str, Object] | None = None
        self._of_service: dict[str, list[Object]] = {}
        self._proxies: dict[Address, _Proxy] = {}
        self._changed = asyncio.Event()

    async def follow(self, client: ApiClient) -> None:
        """Keep names and proxies up to date until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(follow(client, _SERVICES, Mirror(self._take_services)))
            tasks.create_task(follow(client, _SLICES, Mirror(self._take_slices)))
            while True:
                await self._changed.wait()
                self._changed.clear()
                if self._services is not None and self._slices is not None:
                    await self._update()
                    self.known.set()

    def answer(self, message: bytes, *, udp: bool) -> bytes | None:
        """Return the answer to a DNS message, or None if the message is not a question."""
        question = read_question(message)
        if question is None:
            return None
        return write_answer(message, question, resolve(question.name, self._services or {}, self._of_service), udp=udp)

    async def close(self) -> None:
        """Stop listening and abort all connections."""
        for proxy in self._proxies.values():
            proxy.close()
            await proxy.cut()

    def _take_services(self, services: Mapping[str, Object]) -> None:
        self._services = services
        self._changed.set()

    def _take_slices(self, slices: Mapping[str, Object]) -> None:
        self._slices = slices
        self._of_service = {}
        for each in slices.values():
            metadata = each["metadata"]
            name = (metadata.get("labels") or {}).get(SERVICE_LABEL)
            if name is not None and each["addressType"] == "IPv4":
                self._of_service.setdefault(f"{metadata['namespace']}/{name}", []).append(each)
        self._changed.set()

    async def _update(self) -> None:
        """Run a proxy at every cluster address and port with endpoints; ports without endpoints refuse connections."""
        wanted = {}
        for key, service in (self._services or {}).items():
            for port in service["spec"].get("ports") or ():
                address = service["spec"].get("clusterIP") or "None"
                endpoints = self._endpoints(key, port)
                if address != "None" and port.get("protocol", "TCP") == "TCP" and endpoints:
                    wanted[address, int(port["port"])] = endpoints
        for gone in self._proxies.keys() - wanted.keys():
            # Open connections continue, as in a real cluster.
            self._proxies[gone].close()
        for where, endpoints in wanted.items():
            await self._proxies.setdefault(where, _Proxy(where)).lead_to(endpoints)

    def _endpoints(self, key: str, port: Object) -> tuple[Address, ...]:
        if key == "default/kubernetes":
            # The endpoint reconciler of the API server is off, because it removes the endpoints that a test adds.
            return (API_SERVER,)
        return _endpoints(self._of_service.get(key, ()), port.get("name", ""))


def _endpoints(slices: Sequence[Object], port: str) -> tuple[Address, ...]:
    """Return the ready endpoints of a Service's port; without ready endpoints, return the serving endpoints."""
    found = [
        (endpoint.get("conditions", {}), (address, int(each["port"])))
        for slice_ in slices
        for each in slice_.get("ports") or ()
        if (each.get("name") or "") == port
        for endpoint in slice_.get("endpoints") or ()
        for address in endpoint["addresses"]
    ]
    ready = tuple(address for conditions, address in found if conditions.get("ready") is not False)
    return ready or tuple(address for conditions, address in found if conditions.get("serving"))


class _Proxy:
    """Listens at one cluster address and port, and distributes connections to the endpoints by round robin."""

    def __init__(self, where: Address) -> None:
        self._where = where
        self._endpoints: Sequence[Address] = ()
        self._turns = itertools.count()
        self._server: asyncio.Server | None = None
        self._open: set[_Side] = set()

    async def lead_to(self, endpoints: Sequence[Address]) -> None:
        """Listen, and send new connections to these endpoints."""
        self._endpoints = endpoints
        if self._server is None:
            loop = asyncio.get_running_loop()
            self._server = await loop.create_server(self._accept, *self._where, backlog=1024)

    def close(self) -> None:
        """Refuse new connections; open connections continue."""
        if self._server is not None:
            self._server.close()
            self._server = None

    async def cut(self) -> None:
        """Abort the open connections."""
        for side in tuple(self._open):
            side.transport.abort()
        # The event loop calls connection_lost in its next iteration.
        await asyncio.sleep(0)

    def _accept(self) -> _Side:
        return _Side(self._open, connect=self._connect)

    async def _connect(self, near: _Side) -> _Side:
        address = self._endpoints[next(self._turns) % len(self._endpoints)]
        _, far = await asyncio.get_running_loop().create_connection(lambda: _Side(self._open, other=near), *address)
        return far


class _Side(asyncio.Protocol):
    """One side of a proxied connection: forwards data and the end of sending to the other side."""

    def __init__(
        self,
        open_: set[_Side],
        *,
        connect: Callable[[_Side], Awaitable[_Side]] | None = None,
        other: _Side | None = None,
    ) -> None:
        """Create one side; the accepted side creates the other side with ``connect``.

        ``open_`` has the side while its connection is open.
        """
        self.transport: asyncio.Transport
        self._open = open_
        self._connect = connect
        self._other = other
        self._connecting: asyncio.Task[None] | None = None
        self._ended = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._open.add(self)
        if self._connect is not None:
            transport.pause_reading()
            self._connecting = asyncio.create_task(self._reach(self._connect))

    def data_received(self, data: bytes) -> None:
        self._others.write(data)

    def eof_received(self) -> bool:
        assert self._other is not None
        self._ended = True
        if not self._other._ended:
            self._others.write_eof()
            return True
        self._others.close()
        return False

    def pause_writing(self) -> None:
        self._others.pause_reading()

    def resume_writing(self) -> None:
        self._others.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._open.discard(self)
        if self._connecting is not None:
            self._connecting.cancel()
        if self._other is not None:
            if exc is None:
                self._others.close()
            else:
                self._others.abort()

    @property
    def _others(self) -> asyncio.Transport:
        assert self._other is not None
        return self._other.transport

    async def _reach(self, connect: Callable[[_Side], Awaitable[_Side]]) -> None:
        try:
            self._other = await connect(self)
        except OSError:
            self.transport.abort()
        else:
            self.transport.resume_reading()


@asynccontextmanager
async def _name_server(state: _State) -> AsyncGenerator[None, None]:
    """Run a DNS server on UDP and TCP."""

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                size = int.from_bytes(await reader.readexactly(2))
                answer = state.answer(await reader.readexactly(size), udp=False)
                if answer is None:
                    break
                writer.write(len(answer).to_bytes(2) + answer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(
        lambda: _Datagrams(state), local_addr=(NAMESERVER, _DNS_PORT)
    )
    try:
        async with await asyncio.start_server(converse, NAMESERVER, _DNS_PORT):
            yield
    finally:
        transport.close()


class _Datagrams(asyncio.DatagramProtocol):
    """The DNS server's UDP side."""

    def __init__(self, state: _State) -> None:
        self._state = state
        self._transport: asyncio.DatagramTransport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # asyncio's transport class is not a subclass of the documented DatagramTransport.
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str | Any, int]) -> None:
        answer = self._state.answer(data, udp=True)
        if answer is not None:
            self._transport.sendto(answer, addr)
