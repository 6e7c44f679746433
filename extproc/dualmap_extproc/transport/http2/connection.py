"""An HTTP/2 connection of the server: frames in, calls and frames out."""

from collections.abc import Callable, Mapping

from dualmap_extproc.transport.http2.calls import Call, Factory
from dualmap_extproc.transport.http2.limits import Http2Counters, Http2Limits


class Http2Connection:
    """One connection. The adapter passes bytes and the time, and writes ``take_output`` to the socket.

    After each ``receive``, ``on_deadline``, ``drain`` and ``on_output``, the adapter takes the output: repeatedly until
    it is empty, or until the socket accepts no more. It then closes the socket if ``closing``, and else asks for
    ``next_deadline``.
    """

    def __init__(
        self,
        methods: Mapping[bytes, Factory],
        limits: Http2Limits,
        now: float,
        *,
        peer: str,
        counters: Http2Counters,
        on_output: Callable[[], None],
        on_failure: Callable[[Call, Exception], None],
    ) -> None:
        """Begin a connection. ``methods`` has a factory for each path.

        ``on_output`` is called once when output or a deadline appears outside ``receive``, ``on_deadline`` and
        ``drain``; it must only schedule. ``on_failure`` is called with an exception of a handler.
        """
        raise NotImplementedError

    @property
    def closing(self) -> bool:
        """Whether the connection has ended: the socket is to be closed as soon as the output is written."""
        raise NotImplementedError

    @property
    def open_calls(self) -> int:
        """The number of calls that are not ended, or whose messages are not all in the output."""
        raise NotImplementedError

    def receive(self, now: float, data: bytes | memoryview) -> None:
        """Process bytes of the peer. No part of ``data`` is used after the return."""
        raise NotImplementedError

    def take_output(self) -> bytes:
        """Return the next bytes for the socket, empty if there are none."""
        raise NotImplementedError

    def next_deadline(self) -> float | None:
        """Return the time at which ``on_deadline`` must be called, None when closing. It may move in both directions."""
        raise NotImplementedError

    def on_deadline(self, now: float) -> None:
        """Do what is due at ``now``; nothing if called early."""
        raise NotImplementedError

    def drain(self, now: float) -> None:
        """Announce the end, accept the calls that are already on the way, and close after the last call."""
        raise NotImplementedError

    def lost(self, now: float) -> None:
        """The socket is closed: cancel all calls."""
        raise NotImplementedError
