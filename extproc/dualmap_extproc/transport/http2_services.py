"""Services that are written for grpc.aio, on the HTTP/2 server: their handlers, and the context of their calls.

Each call has a task, as in grpc.aio. The calls of these services are few: discovery, health, autoscaling, access log
and the other routers. The messages that a call has not read yet are bounded for each connection: above the bound, the
server reads nothing from the connection (``Client.add_unread``).
"""

import asyncio
import contextlib
import inspect
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, NoReturn, Protocol

import grpc
from google.protobuf.message import DecodeError

from dualmap_edge.logs import get_logger, place_of
from dualmap_extproc.transport.grpc_server import Handler
from dualmap_extproc.transport.http2.calls import Call, Factory
from dualmap_extproc.transport.http2.status import Status

UNSENT_BYTES_MAX: Final = 262_144
"""A call that sends waits while the client's windows hold back more than this."""
_EOF: Final[Any] = grpc.aio.EOF  # type: ignore[attr-defined] # grpc-stubs declares only the type
_log = get_logger(__name__)


class Client(Protocol):
    """The connection of a call."""

    def peer(self) -> str:
        """Return the client's address in gRPC's notation."""

    def peer_identities(self) -> Sequence[bytes] | None:
        """Return the names in the client's verified certificate, or None without such a certificate."""

    def add_unread(self, size_bytes: int) -> None:
        """Count bytes that the connection has received and a call has not read (negative: it has read them)."""


class Methods(Mapping[bytes, Factory]):
    """What serves each method of a connection: ``direct`` ones by path, and all of ``handlers``."""

    def __init__(self, direct: Mapping[bytes, Factory], handlers: Sequence[Handler], client: Client) -> None:
        self._methods = dict(direct)
        self._handlers = handlers
        self._client = client

    def __getitem__(self, path: bytes) -> Factory:
        """Return a method's factory. Raises KeyError."""
        found = self._methods.get(path)
        if found is None:
            found = self._methods[path] = self._find(path)
        return found

    def __iter__(self) -> Iterator[bytes]:
        """Return the paths that were found."""
        return iter(self._methods)

    def __len__(self) -> int:
        """Return the number of paths that were found."""
        return len(self._methods)

    def _find(self, path: bytes) -> Factory:
        details: Any = _Details(path.decode("latin-1"))
        for handler in self._handlers:
            method = handler.service(details)
            if method is not None:
                return partial(_Served, method, self._client)
        raise KeyError(path)


class _Details(grpc.HandlerCallDetails):
    """The method that is looked up in a handler."""

    def __init__(self, method: str) -> None:
        self.method = method
        self.invocation_metadata = ()


class _Served:
    """One call that a task serves."""

    def __init__(self, method: Any, client: Client, call: Call) -> None:
        self._method = method
        self._client = client
        self._call = call
        self._received: deque[bytes] = deque()
        self._half_closed = False
        self._changed = asyncio.Event()
        self._drained = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._run())
        # A task that is cancelled before its first step ends without `_run`.
        self._task.add_done_callback(self._drop_unread)

    # What the connection reports.

    def message(self, now: float, data: memoryview | bytes) -> None:
        self._received.append(bytes(data))
        self._client.add_unread(len(data))
        self._changed.set()

    def half_closed(self, now: float) -> None:
        self._half_closed = True
        self._changed.set()

    def cancelled(self, now: float) -> None:
        self._task.cancel()

    def drained(self) -> None:
        self._drained.set()

    # The context of the method, as grpc.aio has it.

    def peer(self) -> str:
        return self._client.peer()

    def peer_identities(self) -> Sequence[bytes] | None:
        return self._client.peer_identities()

    async def read(self) -> Any:
        """Return the next message, or EOF."""
        while not self._received:
            if self._half_closed:
                return _EOF
            self._changed.clear()
            await self._changed.wait()
        data = self._received.popleft()
        self._client.add_unread(-len(data))
        deserialize = self._method.request_deserializer
        return data if deserialize is None else deserialize(data)

    async def write(self, message: Any) -> None:
        """Send a message; wait while the client does not read."""
        serialize = self._method.response_serializer
        self._call.send(message if serialize is None else serialize(message))
        while self._call.unsent_bytes > UNSENT_BYTES_MAX:
            self._drained.clear()
            await self._drained.wait()

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: object = ()) -> NoReturn:
        """End the call with a status."""
        self._call.finish(Status[code.name], details)
        raise grpc.aio.AbortError

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (message := await self.read()) is not _EOF:
            yield message

    async def _run(self) -> None:
        try:
            await self._serve()
        except grpc.aio.AbortError:
            pass
        except DecodeError as error:
            self._call.finish(Status.INVALID_ARGUMENT, str(error))
        except Exception as error:  # noqa: BLE001
            name = type(error).__name__
            _log.error("Unexpected error in a call", path=self._call.path, error=name, place=place_of(error))
            self._call.finish(Status.UNKNOWN, f"Unexpected {type(error).__name__}")
        else:
            self._call.finish()

    def _drop_unread(self, task: asyncio.Task[None]) -> None:
        """The call has ended: nothing reads the messages that are left."""
        self._client.add_unread(-sum(map(len, self._received)))
        self._received.clear()

    async def _serve(self) -> None:
        """Call the method in the way of its kind, and send what it returns."""
        method = self._method
        asked: Any = self
        if not method.request_streaming:
            asked = await self.read()
            if asked is _EOF:
                await self.abort(grpc.StatusCode.INTERNAL, "the request is missing")
        if not method.response_streaming:
            serve = method.stream_unary if method.request_streaming else method.unary_unary
            await self.write(await serve(asked, self))
            return
        serve = method.stream_stream if method.request_streaming else method.unary_stream
        if inspect.isasyncgenfunction(serve):
            async with contextlib.aclosing(serve(asked, self)) as answers:
                async for answer in answers:
                    await self.write(answer)
        else:
            await serve(asked, self)
