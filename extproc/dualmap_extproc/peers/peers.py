"""The other routers: who they are, which may own pools, and the messages from and to them.

Either of two routers may open the connection, and both may do so at once. The router whose name sorts first decides
which connection both use: the first one, until it has ended. Messages to a router therefore arrive in order. A router
that is reached through an address of its own knows it by its name.
"""

import asyncio
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final, Protocol, TypeAlias

import grpc

from dualmap.ownership.messages import Message
from dualmap.scaling.reports import ROUTERS_MAX
from dualmap_edge.logs import OncePerMinute, get_logger, place_of
from dualmap_extproc.peers.codec import (
    ACCEPT,
    MESSAGE_BYTES_MAX,
    Frame,
    RouterState,
    UnreadableFrame,
    decode_frame,
    encode_entry,
    encode_message,
    encode_shared,
    encode_state,
)
from dualmap_extproc.peers.dialer import Dialer, Finder, Security, Unreachable
from dualmap_extproc.peers.handshake import Introduction, NotAPeer
from dualmap_extproc.peers.link import Link, Stream, reason_of
from dualmap_extproc.request.ending import AccessLogEntry
from dualmap_extproc.request.ids import router_of

SERVICE: Final = "dualmap.v1.Peers"
METHOD: Final = "Connect"
HANDSHAKE_S: Final = 1.0
"""The longest time from the first frame until a connection is used."""
END_S: Final = 2.0
"""The longest time that a router that ends waits until the others have received its last messages."""
# The most connections that other programs opened and that are not yet used.
_HANDSHAKES_MAX: Final = 2 * ROUTERS_MAX
# A pause lets the event loop serve requests after so many messages of one frame, and after each shared payload.
_MESSAGES_AT_ONCE: Final = 64
_log = get_logger(__name__)

_Context: TypeAlias = "grpc.aio.ServicerContext[bytes, bytes]"


class PeersListener(Protocol):
    """What the messages of other routers are about; the picker implements this interface."""

    def on_message(self, now: float, pool: str, peer: str, message: Message) -> None:
        """Apply the message of router ``peer`` about a pool."""

    def on_routers(self, now: float, routers: Collection[str]) -> None:
        """Take the names of the routers that may own pools, this one among them if it may."""

    def on_router_lost(self, now: float, peer: str) -> None:
        """Forget a router to which the connection is lost."""

    def access_log(self, now: float, entry: AccessLogEntry) -> None:
        """Apply an access log entry that another router received."""

    def on_orphan(self, now: float, entry: AccessLogEntry) -> None:
        """Apply an access log entry about a request of a router that has ended."""


class Peers:
    """All connections of this router to the other routers.

    ``name`` is this router's name among the routers, and the prefix of its request ids. ``find`` returns the addresses
    of the routers, and ``security`` says how to connect to them (None: without TLS). ``on_shared`` receives each shared
    payload with the router that sent it.
    """

    def __init__(
        self,
        listener: PeersListener,
        *,
        name: str,
        hash_key: bytes,
        find: Finder,
        security: Security | None = None,
        on_shared: Callable[[str, bytes], None] = lambda peer, payload: None,
    ) -> None:
        self._listener = listener
        self._name = name
        self._hash_key = hash_key
        self._on_shared = on_shared
        self._clock = asyncio.get_running_loop().time
        self._dialer = Dialer(
            find,
            self._connect,
            is_connected=lambda peer: peer in self._links,
            security=security,
            name=name,
            method=f"/{SERVICE}/{METHOD}",
        )
        self._links: dict[str, Link] = {}
        self._states: dict[str, RouterState] = {}
        self._state = RouterState(warm=False, leaving=False)
        self._alone = asyncio.Event()
        self._alone.set()
        self._lost: Callable[[str], None] = lambda peer: None
        self._owners: frozenset[str] | None = None
        self._handshakes = 0
        self._has_warned_of_same_id = False
        self._refused = OncePerMinute(_log, "Not connecting to another router", self._clock)
        self._unreadable = OncePerMinute(_log, "Closed a connection with an unreadable frame", self._clock)
        self._failed = OncePerMinute(_log, "Failed to apply a message of another router", self._clock)
        self._too_many = OncePerMinute(_log, "Not connecting to further routers", self._clock)
        self._oversized = OncePerMinute(_log, "Dropping an oversized message to another router", self._clock)

    def handler(self) -> "grpc.GenericRpcHandler[Any, Any]":
        """Return the service's handler, for registration in grpc.aio."""
        # The method has no deserializer, so that a frame that is not protobuf is not an error in gRPC's task.
        method = grpc.stream_stream_rpc_method_handler(self._serve)
        return grpc.method_handlers_generic_handler(SERVICE, {METHOD: method})

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the connected routers."""
        return tuple(self._links)

    def on_lost(self, lost: Callable[[str], None]) -> None:
        """Set the function to call with the name of each router to which a connection is lost.

        Messages that were sent within the last moments may not have arrived.
        """
        self._lost = lost

    def send(self, pool: str, peer: str, message: Message) -> None:
        """Send a message about a pool soon; drop it if there is no connection to the router ``peer``."""
        link = self._links.get(peer)
        if link is not None:
            self._send([link], encode_message(pool, message))

    def share(self, payload: bytes) -> None:
        """Send a payload to every connected router soon."""
        self._send(self._links.values(), encode_shared(payload))

    def forward(self, entry: AccessLogEntry) -> bool:
        """Send an access log entry to the router that assigned its request id; return whether it is connected."""
        link = self._links.get(router_of(entry.request_id))
        if link is not None:
            self._send([link], encode_entry(entry))
        return link is not None

    def reaches(self, request_id: str) -> bool:
        """Return whether the router that assigned a request id is connected and not about to end."""
        state = self._states.get(router_of(request_id))
        return state is not None and not state.leaving

    def orphan(self, entry: AccessLogEntry) -> None:
        """Send an access log entry to all routers, because the router that assigned its request id has ended."""
        self._send(self._links.values(), encode_entry(entry))

    def warm(self) -> None:
        """Announce that this router knows enough of the past to own pools."""
        self._announce(replace(self._state, warm=True))

    def leave(self) -> None:
        """Announce that this router is about to end."""
        self._announce(replace(self._state, leaving=True))

    async def tried(self) -> None:
        """Wait until the first attempts to connect have ended: one for each address that was found first."""
        await self._dialer.tried.wait()

    async def run(self) -> None:
        """Find the other routers and keep a connection to each, until cancelled."""
        self._report_owners()
        await self._dialer.run()

    async def end(self) -> None:
        """Send the last messages: return when all other routers have received them, after END_S at the latest.

        The other routers close their connections when they have received the state ``ended``. This router accepts and
        opens no connection from now on.
        """
        self._announce(replace(self._state, leaving=True, ended=True))
        with suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await self._alone.wait()

    async def close(self) -> None:
        """Close all connections, without the messages that wait to be sent."""
        await self._dialer.close()
        for link in tuple(self._links.values()):
            self._lose(link, "this router ends")

    def _send(self, links: Collection[Link], frame: bytes) -> None:
        if len(frame) > MESSAGE_BYTES_MAX:
            self._oversized.warn(1, size=len(frame))
            return
        for link in links:
            link.send(frame)

    def _announce(self, state: RouterState) -> None:
        if state == self._state:
            return
        self._state = state
        for link in self._links.values():
            link.send(encode_state(state))
        self._report_owners()

    def _report_owners(self) -> None:
        """Tell the listener which routers may own pools, if this has changed: warm ones, else all that stay."""
        states = {self._name: self._state, **self._states}
        staying = frozenset(name for name, state in states.items() if not state.leaving)
        owners = frozenset(name for name in staying if states[name].warm) or staying
        if owners != self._owners and self._call(lambda: self._listener.on_routers(self._clock(), owners)):
            self._owners = owners

    def _call(self, apply: Callable[[], None], **about: object) -> bool:
        """Call the listener; return whether it did not fail. Another router must not be able to end this one."""
        try:
            apply()
        except Exception as error:  # noqa: BLE001
            self._failed.warn(1, **about, error=type(error).__name__, place=place_of(error))
            return False
        return True

    # Connections.

    async def _serve(self, _: object, context: _Context) -> None:
        """Serve a connection that another router opened."""
        if self._state.ended:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "this router ends")
        if self._handshakes >= _HANDSHAKES_MAX:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many connections")
        self._handshakes += 1
        try:
            _, link = await self._introduce(context, context.peer(), dialed=False)
        finally:
            self._handshakes -= 1
        if link is not None:
            await self._keep(link)

    async def _connect(self, stream: Stream, address: str) -> str | None:
        """Serve a connection that this router opened; return the other router's name if it is a peer.

        Raises Unreachable.
        """
        if self._state.ended:
            raise Unreachable("this router ends")
        name, link = await self._introduce(stream, address, dialed=True)
        self._dialer.on_attempt(address)
        if link is not None:
            await self._keep(link)
        return name

    async def _introduce(self, stream: Stream, address: str, *, dialed: bool) -> tuple[str | None, Link | None]:
        """Do the handshake; return the name of the other router, and the link if the connection is used.

        Raises Unreachable if there is no answer at an address that this router dialed.
        """
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                return await self._shake_hands(stream, address, dialed=dialed)
        except NotAPeer as error:
            self._refused.warn(1, address=address, reason=str(error))
        except UnreadableFrame as error:
            self._unreadable.warn(1, address=address, reason=str(error))
        # gRPC raises errors of several classes for a stream that has ended.
        except Exception as error:  # noqa: BLE001
            if dialed:
                raise Unreachable(reason_of(error)) from None
            # Any program may connect to the port and send nothing.
            _log.debug("Closed a connection before its handshake", address=address, reason=reason_of(error))
        return None, None

    async def _shake_hands(self, stream: Stream, address: str, *, dialed: bool) -> tuple[str | None, Link | None]:
        own = Introduction.new(self._name, self._hash_key, dialed=dialed)
        await stream.write(own.hello)
        other = own.read_hello(await _read(stream))
        if other.name == self._name:
            return other.name, None
        await stream.write(own.proof(other) + encode_state(self._state))
        state = own.check_proof(await _read(stream), other)
        if _replica_of(other.name) == _replica_of(self._name) and not (state.leaving or self._state.leaving):
            self._warn_of_same_id(address)
        if len(self._links) >= ROUTERS_MAX and other.name not in self._links:
            self._too_many.warn(1, connected=len(self._links), address=address)
            return None, None
        if self._name < other.name:
            if other.name in self._links:
                return other.name, None
            link = self._use(other.name, stream, state, address)
            try:
                # The link writes what is sent from now on after this frame, and not in one frame with it.
                await stream.write(ACCEPT)
            except BaseException:
                self._lose(link, "it did not wait for an answer")
                raise
            return other.name, link
        data = await stream.read()
        if not isinstance(data, bytes):
            # The other router already uses another connection to this one.
            return other.name, None
        if not decode_frame(data).accept:
            raise UnreadableFrame("a frame before the connection is accepted")
        self._lose(self._links.get(other.name), "it opened another connection")
        return other.name, self._use(other.name, stream, state, address)

    def _warn_of_same_id(self, address: str) -> None:
        """Log once that another router, which is no successor of this one, has the same replica id."""
        if not self._has_warned_of_same_id:
            self._has_warned_of_same_id = True
            _log.warning(
                "Another router has the same replica id, so metrics and traces mix the two; "
                "give each router its own --replica-id",
                replica_id=_replica_of(self._name),
                address=address,
            )

    def _use(self, name: str, stream: Stream, state: RouterState, address: str) -> Link:
        link = self._links[name] = Link(name, stream)
        self._states[name] = state
        self._alone.clear()
        # The state may have changed since the proof.
        link.send(encode_state(self._state))
        _log.info("Connected to another router", router=name, address=address)
        return link

    async def _keep(self, link: Link) -> None:
        """Serve a connection until it ends."""
        reason = "it was closed"
        try:
            self._report_owners()
            reason = await link.run(lambda frame: self._receive(link, frame))
        finally:
            self._lose(link, reason)

    def _lose(self, link: Link | None, reason: str) -> None:
        """Forget a connection, unless another one has replaced it."""
        if link is None or self._links.get(link.peer) is not link:
            return
        link.end(reason)
        del self._links[link.peer], self._states[link.peer]
        _log.info("Lost the connection to another router", router=link.peer, reason=reason)
        if not self._links:
            self._alone.set()
        self._call(lambda: self._listener.on_router_lost(self._clock(), link.peer), router=link.peer)
        self._call(lambda: self._lost(link.peer), router=link.peer)
        self._report_owners()

    async def _receive(self, link: Link, frame: Frame) -> None:
        """Pass on a frame's content in slices; the connection ends if a part of it cannot be applied."""
        at_once = 1 if frame.shared else _MESSAGES_AT_ONCE
        for number, apply in enumerate(self._parts(link.peer, frame), 1):
            # The connection may have been lost or replaced meanwhile.
            if self._links.get(link.peer) is not link:
                return
            if not self._call(apply, router=link.peer):
                link.end("its message could not be applied")
                return
            if number % at_once == 0:
                await asyncio.sleep(0)
        # Last, because the frame may have joined earlier messages.
        if frame.state is not None and frame.state.ended:
            link.end("it has ended")

    def _parts(self, peer: str, frame: Frame) -> Iterator[Callable[[], None]]:
        """Yield functions that apply the parts of a frame."""
        if frame.state is not None:
            yield partial(self._take_state, peer, frame.state)
        for pool, message in frame.messages:
            yield partial(self._listener.on_message, self._clock(), pool, peer, message)
        for entry in frame.entries:
            if router_of(entry.request_id) == self._name:
                yield partial(self._listener.access_log, self._clock(), entry)
            else:
                yield partial(self._listener.on_orphan, self._clock(), entry)
        for payload in frame.shared:
            yield partial(self._on_shared, peer, payload)

    def _take_state(self, peer: str, state: RouterState) -> None:
        self._states[peer] = state
        self._report_owners()


def _replica_of(router: str) -> str:
    """Return the ``--replica-id`` of a router: its name without the random number of the process."""
    return router.rpartition("-")[0]


async def _read(stream: Stream) -> bytes:
    """Return the next frame of a handshake. Raises UnreadableFrame at the stream's end."""
    data = await stream.read()
    if not isinstance(data, bytes):
        raise UnreadableFrame("it closed the connection")
    return data
