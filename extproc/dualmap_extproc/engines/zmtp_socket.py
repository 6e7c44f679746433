"""A TCP socket with a ZMTP connection that is read only when its owner asks for it.

What the owner does not read waits in the kernel and then at the peer. The owner thus decides how much memory and time a
peer can take.
"""

import asyncio
import errno
import os
import socket
from collections.abc import Callable, Sequence
from typing import Final

from dualmap_extproc.engines.zmtp import ProtocolError, ZmtpConnection

RECEIVE_BYTES: Final = 65536
"""The most bytes that one call receives."""
KERNEL_BYTES: Final = 131072
"""The size of the kernel's receive buffer. By default the kernel enlarges it to some megabytes."""
_PORT_MAX: Final = 65_535
# Without these probes, the end of a host that sends nothing more is never seen.
_KEEPALIVE: Final = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))


class ZmtpSocket:
    """A connection to ``host``, an IP address, and ``port``. The constructor raises OSError.

    ``on_ready`` is called once after each ``watch`` when there is something to receive.
    """

    def __init__(
        self,
        host: str,
        port: int,
        connection: ZmtpConnection,
        loop: asyncio.AbstractEventLoop,
        on_ready: Callable[[], None],
    ) -> None:
        self._connection = connection
        self._loop = loop
        self._on_ready = on_ready
        self._connected = False
        if port > _PORT_MAX:
            # An engine names its ranks, and a rank is added to the pool's port.
            raise OSError(f"there is no port {port}")
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        # asyncio's selectors write out a socket object at each change, but not a number.
        self._descriptor = self._socket.fileno()
        try:
            self._socket.setblocking(False)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, KERNEL_BYTES)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _KEEPALIVE:
                # Not every system has all of them.
                if hasattr(socket, name):
                    self._socket.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
            error = self._socket.connect_ex((host, port))
            if error not in (0, errno.EINPROGRESS):
                raise OSError(error, os.strerror(error))
        except OSError:
            self._socket.close()
            raise

    @property
    def is_open(self) -> bool:
        """Whether the peer has answered the handshake."""
        return self._connection.is_open

    @property
    def is_connected(self) -> bool:
        """Whether the TCP connection to the port is open."""
        return self._connected

    @property
    def waiting_bytes(self) -> int:
        """The bytes that were received and not returned."""
        return self._connection.waiting_bytes

    def watch(self) -> None:
        """Call ``on_ready`` when there is something to receive."""
        if self._connected:
            self._loop.add_reader(self._descriptor, self._ready)
        else:
            self._loop.add_writer(self._descriptor, self._ready)

    def receive(self) -> Sequence[bytes] | None:
        """Return the frames of the next message, none if something else was done; None if there is nothing to do.

        Raises OSError or ProtocolError. Then the socket must be closed.
        """
        if not self._connected:
            return self._finish_connecting()
        frames = self._connection.next_message()
        if frames is None:
            try:
                data = self._socket.recv(RECEIVE_BYTES)
            except (BlockingIOError, InterruptedError):
                return None
            if not data:
                raise ConnectionResetError("the peer closed the connection")
            self._connection.receive(data)
            frames = self._connection.next_message()
        self._flush()
        return () if frames is None else frames

    def close(self) -> None:
        """Close the socket."""
        self._unwatch()
        self._socket.close()

    def _finish_connecting(self) -> Sequence[bytes] | None:
        error = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, os.strerror(error))
        try:
            self._socket.getpeername()
        except OSError as failed:
            if failed.errno == errno.ENOTCONN:
                return None
            raise
        self._unwatch()
        self._connected = True
        self._flush()
        return ()

    def _flush(self) -> None:
        """Send what the connection has to say, which is less than the kernel's buffer if the peer reads."""
        output = self._connection.take_output()
        if output and self._socket.send(output) < len(output):
            raise ProtocolError("the peer does not read")

    def _ready(self) -> None:
        # The descriptor stays ready until the socket is read, which may be some turns later.
        self._unwatch()
        self._on_ready()

    def _unwatch(self) -> None:
        if self._connected:
            self._loop.remove_reader(self._descriptor)
        else:
            self._loop.remove_writer(self._descriptor)
