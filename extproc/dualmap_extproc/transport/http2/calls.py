"""A gRPC call as its handler sees it, and the handler."""

from collections.abc import Callable
from typing import Protocol, TypeAlias

from dualmap_extproc.transport.http2.status import Status


class CallHandler(Protocol):
    """The server side of one call. The factory of the call's method makes it; it may use its call at any time.

    A call ends exactly once: by the handler's ``Call.finish``, or by ``cancelled``. No method is called after the end.
    An exception of a method ends the call with INTERNAL, and ``cancelled`` is called.
    """

    def message(self, now: float, data: memoryview | bytes) -> None:
        """Receive one whole message. ``data`` is valid only until this method returns."""

    def half_closed(self, now: float) -> None:
        """The client sends no further message."""

    def cancelled(self, now: float) -> None:
        """The call has ended without ``finish``: reset, lost connection, deadline, or an error of its frames."""

    def drained(self) -> None:
        """All messages that waited are in the output (``Call.unsent_bytes`` is 0). Not called if none waited."""


class Call(Protocol):
    """One call: what the client asked for, and the means to answer.

    The methods may be called at any time, also outside a callback. After the call's end they do nothing.
    """

    @property
    def path(self) -> str:
        """The method, such as ``/package.Service/Method``."""

    @property
    def peer(self) -> str:
        """The client's identity, as the connection received it."""

    @property
    def unsent_bytes(self) -> int:
        """The bytes of messages that wait: for the client's windows, or until the adapter takes the output."""

    @property
    def ended(self) -> bool:
        """Whether the call is finished or cancelled."""

    def send(self, message: bytes) -> None:
        """Send one message, and the response's headers before the first one."""

    def finish(self, status: Status = Status.OK, message: str = "") -> None:
        """End the call after all sent messages. If the client has not half-closed, the stream is then reset."""


Factory: TypeAlias = Callable[[Call], CallHandler]
