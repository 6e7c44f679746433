"""Limits of the open connections of a server: in all, and of each source address.

Above a limit, a new connection replaces the connection that has been idle for the longest time. A client with many idle
connections therefore keeps no other client from the server.
"""

import asyncio
from collections.abc import Callable


class Connections:
    """The open connections of one server, at most ``most``, and at most ``most_of_source`` of one source address.

    ``new_protocol`` makes the protocol of an accepted connection. A connection is idle unless the server has marked it
    as busy. If all connections within a limit are busy, a new connection is closed at once.
    """

    def __init__(self, new_protocol: Callable[[], asyncio.Protocol], *, most: int, most_of_source: int) -> None:
        self._new_protocol = new_protocol
        self._most = most
        self._most_of_source = most_of_source
        # The source of every open connection. The connection that has been idle for the longest time is first.
        self._sources: dict[asyncio.Transport, str] = {}
        self._busy: set[asyncio.Transport] = set()

    def accept(self) -> asyncio.Protocol:
        """Return the protocol of a new connection, for ``loop.create_server``."""
        return _Arriving(self._arrived)

    def begin(self, transport: asyncio.Transport) -> None:
        """Mark a connection as busy: the server answers a request on it."""
        if transport in self._sources:
            self._busy.add(transport)

    def end(self, transport: asyncio.Transport) -> None:
        """Mark a connection as idle since now."""
        self._busy.discard(transport)
        if transport in self._sources:
            self._sources[transport] = self._sources.pop(transport)

    def _arrived(self, transport: asyncio.Transport) -> None:
        self._sources = {each: source for each, source in self._sources.items() if not each.is_closing()}
        self._busy &= self._sources.keys()
        source = str((transport.get_extra_info("peername") or ("",))[0])
        of_source = [each for each, other in self._sources.items() if other == source]
        for connections, most in ((of_source, self._most_of_source), (list(self._sources), self._most)):
            # The connections without the one that the limit of the source has closed.
            still_open = [each for each in connections if each in self._sources]
            if len(still_open) >= most and not self._close_idle(still_open):
                transport.abort()
                return
        self._sources[transport] = source
        protocol = self._new_protocol()
        transport.set_protocol(protocol)
        protocol.connection_made(transport)

    def _close_idle(self, connections: list[asyncio.Transport]) -> bool:
        """Close the first idle one of these connections; return whether there is one."""
        for transport in connections:
            if transport not in self._busy:
                # A close without an abort would wait for a client that reads nothing.
                transport.abort()
                del self._sources[transport]
                return True
        return False


class _Arriving(asyncio.Protocol):
    """The protocol of a connection until it is accepted or closed."""

    def __init__(self, arrived: Callable[[asyncio.Transport], None]) -> None:
        self._arrived = arrived

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._arrived(transport)
