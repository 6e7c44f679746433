"""The HTTP/2 server's sockets: listeners, TLS, connections, and the drain.

``http2`` is the protocol without I/O. This module gives it bytes, the event loop's clock and a timer for each
connection, and writes its output: once after each read, and once in a turn of the event loop for all other answers.
"""

import asyncio
import contextlib
import socket
import ssl
import sys
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias
from urllib.parse import quote

from dualmap_edge.logs import OncePerMinute, get_logger, place_of
from dualmap_extproc.transport.http2.calls import Call, Factory
from dualmap_extproc.transport.http2.connection import Http2Connection
from dualmap_extproc.transport.http2.limits import Http2Counters, Http2Limits
from dualmap_extproc.transport.http2_services import Client
from dualmap_extproc.transport.tls import ALPN, Certificates, names_of
from dualmap_extproc.wire.peer import peer_of

CONNECTIONS_MAX: Final = 4096
"""The most open connections, with those that are in their TLS handshake."""
HANDSHAKE_S: Final = 10.0
"""The longest time of a TLS handshake."""
WRITE_BYTES: Final = 1024 * 1024
"""The bytes that wait for a connection's socket, above which the server reads nothing from the connection."""
UNREAD_BYTES: Final = 4 * 1024 * 1024
"""The received bytes that the calls of a connection have not read, above which the server reads nothing from it."""
READ_BYTES: Final = 256 * 1024
STALLED_S: Final = 30.0
"""The server disconnects a client that does not read for this time."""
_BACKLOG: Final = 1024
# The longest time in which TLS ends before the socket is closed.
_TLS_SHUTDOWN_S: Final = 1.0
# The pause after an accept fails, since no file descriptor is free.
_ACCEPT_PAUSE_S: Final = 0.1
_log = get_logger(__name__)

Methods: TypeAlias = Callable[[Client], Mapping[bytes, Factory]]


class Http2Server:
    """A server on one port. ``methods`` returns what serves each method, for the client of one connection."""

    def __init__(self, methods: Methods, limits: Http2Limits, *, connections_max: int = CONNECTIONS_MAX) -> None:
        self._methods = methods
        self._limits = limits
        self._connections_max = connections_max
        self.counters = Http2Counters()
        self._certificates: Certificates | None = None
        self._listeners: list[socket.socket] = []
        self._opening: set[asyncio.Task[None]] = set()
        # The accepted sockets whose tasks have not begun. A task that is cancelled before does not close its socket.
        self._unopened: set[socket.socket] = set()
        self._connections: set[_Connection] = set()
        self._empty = asyncio.Event()
        self._empty.set()
        self._draining = False
        # Every read of every connection uses the same buffer: a new one for each read would cost page faults.
        self._buffer = memoryview(bytearray(READ_BYTES))
        clock = asyncio.get_running_loop().time
        self._too_many = OncePerMinute(_log, "Closing connections above the limit", clock)
        self._failed = OncePerMinute(_log, "Cannot accept a connection", clock)

    @property
    def connections(self) -> int:
        """The number of open connections, without those in their handshake."""
        return len(self._connections)

    @property
    def goaways(self) -> Mapping[str, int]:
        """The number of connections that the server ended, by the reason (``Http2Counters.goaways``)."""
        return self.counters.goaways

    @property
    def refused_streams(self) -> int:
        """The number of calls that were refused because their connection had too many."""
        return self.counters.refused_streams

    async def bind(self, host: str, port: int, certificates: Certificates | None) -> int:
        """Bind the port (0: any), and return it. Raises OSError."""
        self._certificates = certificates
        try:
            for family, address in await _addresses(host, port):
                self._listeners.append(listener := socket.socket(family, socket.SOCK_STREAM))
                port = _bind(listener, address, port)
        except BaseException:
            self._stop_accepting()
            raise
        return port

    async def start(self) -> None:
        """Serve."""
        for listener in self._listeners:
            listener.listen(_BACKLOG)
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    async def drain(self) -> None:
        """Accept no connection and no further call, and wait until every connection has ended its calls."""
        self._stop_accepting()
        for connection in tuple(self._connections):
            connection.drain()
        await self._empty.wait()

    async def close(self) -> None:
        """Close all connections, and cut their calls."""
        self._stop_accepting()
        for connection in tuple(self._connections):
            connection.close()
        await self._empty.wait()

    def _stop_accepting(self) -> None:
        self._draining = True
        for task in self._opening:
            task.cancel()
        for accepted in self._unopened:
            accepted.close()
        self._unopened.clear()
        for listener in self._listeners:
            asyncio.get_running_loop().remove_reader(listener)
            listener.close()
        self._listeners.clear()

    def _accept(self, listener: socket.socket) -> None:
        """Accept a connection that waits at the listener."""
        try:
            accepted, _ = listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return  # The client has gone.
        except OSError as error:
            self._failed.warn(1, reason=error.strerror)
            loop = asyncio.get_running_loop()
            loop.remove_reader(listener)
            loop.call_later(_ACCEPT_PAUSE_S, self._accept_again, listener)
            return
        if len(self._connections) + len(self._opening) >= self._connections_max:
            self._too_many.warn(1, connections=len(self._connections))
            accepted.close()
            return
        accepted.setblocking(False)
        self._unopened.add(accepted)
        task = asyncio.create_task(self._open(accepted))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    def _accept_again(self, listener: socket.socket) -> None:
        if listener in self._listeners:
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    async def _open(self, accepted: socket.socket) -> None:
        """Do the TLS handshake of a connection. The connection begins when this is done."""
        self._unopened.discard(accepted)
        context: ssl.SSLContext | None = None
        options: dict[str, float] = {}
        if self._certificates is not None:
            try:
                # The files may be on a slow disk.
                context = (await asyncio.to_thread(self._certificates.current)).context
            except BaseException:
                accepted.close()
                raise
            options = {"ssl_handshake_timeout": HANDSHAKE_S, "ssl_shutdown_timeout": _TLS_SHUTDOWN_S}
        # A handshake fails with each client that does not trust the certificate. Such a client logs the reason.
        with contextlib.suppress(OSError):
            connect = asyncio.get_running_loop().connect_accepted_socket
            await connect(lambda: _Connection(self), accepted, ssl=context, **options)

    def begin(self, connection: "_Connection") -> Http2Connection:
        """Return the protocol of a new connection."""
        self._connections.add(connection)
        self._empty.clear()
        http2 = Http2Connection(
            self._methods(connection),
            self._limits,
            asyncio.get_running_loop().time(),
            peer=peer_of(connection),
            counters=self.counters,
            on_output=connection.schedule,
            on_failure=_report,
        )
        if self._draining:
            http2.drain(asyncio.get_running_loop().time())
        return http2

    def end(self, connection: "_Connection") -> None:
        """Forget a connection that is closed."""
        self._connections.discard(connection)
        if not self._connections:
            self._empty.set()

    @property
    def buffer(self) -> memoryview:
        """The buffer into which every connection reads."""
        return self._buffer


class _Connection(asyncio.BufferedProtocol):
    """One connection. It is the ``Client`` of its calls."""

    def __init__(self, server: Http2Server) -> None:
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._scheduled = False
        self._paused = False
        self._unread_bytes = 0
        self._peer = ""
        self._names: tuple[bytes, ...] | None = None
        self._transport: asyncio.Transport
        self._http2: Http2Connection | None = None

    # What the transport reports.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        peername = transport.get_extra_info("peername")
        if peername is None:
            # The client has reset the connection already.
            transport.abort()
            return
        self._peer = _shown(peername)
        secure: ssl.SSLObject | None = transport.get_extra_info("ssl_object")
        if secure is not None:
            # A client without ALPN passes the handshake.
            if secure.selected_alpn_protocol() != ALPN:
                transport.abort()
                return
            certificate = secure.getpeercert(binary_form=True)
            self._names = names_of(certificate) if certificate else None
        transport.set_write_buffer_limits(high=WRITE_BYTES)
        self._http2 = self._server.begin(self)
        self._flush()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._server.buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self._http2 is not None:
            self._http2.receive(self._loop.time(), self._server.buffer[:nbytes])
            self._flush()

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        self._paused = True
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._paused = False
        self._flush()
        self._resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._http2 is not None:
            http2, self._http2 = self._http2, None
            http2.lost(self._loop.time())
            self._server.end(self)

    # What the server and the protocol call.

    def drain(self) -> None:
        """Announce the end, and close after the last call."""
        if self._http2 is not None:
            self._http2.drain(self._loop.time())
            self._flush()

    def close(self) -> None:
        """Close at once."""
        self._transport.abort()

    def schedule(self) -> None:
        """Write the output in the next turn of the event loop."""
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._flush)

    def peer(self) -> str:
        """Return the client's address in gRPC's notation."""
        return self._peer

    def peer_identities(self) -> tuple[bytes, ...] | None:
        """Return the names in the client's verified certificate, or None without such a certificate."""
        return self._names

    def add_unread(self, size_bytes: int) -> None:
        """Count bytes that a call has not read (negative: it has read them)."""
        self._unread_bytes += size_bytes
        if self._unread_bytes > UNREAD_BYTES:
            self._transport.pause_reading()
        elif size_bytes < 0:
            self._resume_reading()

    def _resume_reading(self) -> None:
        if not self._paused and self._unread_bytes <= UNREAD_BYTES:
            self._transport.resume_reading()

    def _flush(self) -> None:
        """Write the output as far as the socket accepts it, and set the timer."""
        self._scheduled = False
        http2, transport = self._http2, self._transport
        if http2 is None:
            return
        while not self._paused and (output := http2.take_output()):
            transport.write(output)
        if http2.closing:
            if self._paused:
                # The client does not read, so it would not read the rest either.
                transport.abort()
            else:
                transport.close()
            return
        self._set_timer(http2.next_deadline())

    def _set_timer(self, due_s: float | None) -> None:
        """Wake up at ``due_s``. A timer that ends earlier stays: most deadlines move with each message."""
        timer = self._timer
        if due_s is None or (timer is not None and timer.when() <= due_s):
            return
        if timer is not None:
            timer.cancel()
        self._timer = self._loop.call_at(due_s, self._wake)

    def _wake(self) -> None:
        self._timer = None
        if self._http2 is not None:
            self._http2.on_deadline(self._loop.time())
            self._flush()


def _bind(listener: socket.socket, address: str, port: int) -> int:
    """Bind a socket; return its port. Raises OSError."""
    listener.setblocking(False)
    # Connections of a stopped router do not block the port, but a listener does.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if sys.platform == "linux":
        # Connections inherit this option.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(STALLED_S * 1000))
    if listener.family == socket.AF_INET6:
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, address != "::")
    listener.bind((address, port))
    bound: int = listener.getsockname()[1]
    return bound


async def _addresses(host: str, port: int) -> list[tuple[socket.AddressFamily, str]]:
    """Return the addresses of a host. A wildcard means all addresses of both IP versions, as in gRPC."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    addresses: list[tuple[socket.AddressFamily, str]] = list(
        dict.fromkeys((family, str(where[0])) for family, _, _, _, where in found)
    )
    if any(address in ("0.0.0.0", "::") for _, address in addresses):
        both = socket.has_dualstack_ipv6()
        return [(socket.AF_INET6, "::")] if both else [(socket.AF_INET, "0.0.0.0")]
    return addresses


def _shown(peername: tuple[str, int] | tuple[str, int, int, int]) -> str:
    """Return an address in gRPC's notation."""
    host, port = peername[:2]
    return f"ipv6:{quote(f'[{host}]')}:{port}" if ":" in host else f"ipv4:{host}:{port}"


def _report(call: Call, error: Exception) -> None:
    """Log a handler's error."""
    _log.error("Unexpected error in a call", path=call.path, error=type(error).__name__, place=place_of(error))
