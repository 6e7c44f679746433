"""Opens connections to the other routers: one for each address, again after it has ended, with a bounded backoff."""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from ipaddress import ip_address
from typing import Any, Final, NamedTuple, TypeAlias

import grpc

from dualmap.scaling.reports import ROUTERS_MAX
from dualmap_edge.logs import OncePerMinute, get_logger
from dualmap_edge.ports import address
from dualmap_extproc.peers.codec import FRAME_BYTES_MAX
from dualmap_extproc.peers.link import Stream

FIND_S: Final = 1.0
"""The interval in which the addresses of the routers are found again."""
SHORTEST_BACKOFF_S: Final = 0.05
LONGEST_BACKOFF_S: Final = 1.0
LASTING_S: Final = 5.0
"""The backoff begins again with the shortest after a connection that lasted for this time."""
UNREACHABLE_S: Final = 5.0
"""The time after which an unreachable address is logged. A router that starts or ends is unreachable for a moment."""
# The interval in which a dialer checks whether a router is still connected.
_CHECK_S: Final = 0.25
_OPTIONS: Final = (
    ("grpc.max_receive_message_length", FRAME_BYTES_MAX),
    ("grpc.max_send_message_length", -1),
    # gRPC would share its own backoff between the connections to an address.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
)

_log = get_logger(__name__)


class Unreachable(Exception):
    """There is no connection to an address, or no answer; the message says why."""


class Address(NamedTuple):
    """The IP address and gRPC port of a router."""

    host: str
    port: int

    @property
    def target(self) -> str:
        """The address in gRPC's notation."""
        return f"ipv{ip_address(self.host).version}:{address(self.host, self.port)}"


Finder: TypeAlias = Callable[[], Awaitable[Collection[tuple[str, int]]]]
"""Returns the IP addresses and ports of the routers; this router's own may be among them."""
Security: TypeAlias = Callable[[str, int], Awaitable[tuple[grpc.ChannelCredentials, str]]]
"""Returns the credentials for an address, and the name that the other router's certificate contains."""


class Dialer:
    """Opens connections to the addresses that ``find`` returns.

    ``connect`` serves a connection until it ends, and returns the name of the other router, or None if it is no peer.
    It may raise Unreachable.
    ``on_attempt`` must be called when a connection is used, because an attempt otherwise ends with its connection.
    A router is not dialed while ``is_connected``, and this router (``name``) is never dialed again.
    """

    def __init__(
        self,
        find: Finder,
        connect: Callable[[Stream, str], Awaitable[str | None]],
        *,
        is_connected: Callable[[str], bool],
        security: Security | None,
        name: str,
        method: str,
    ) -> None:
        self._find = find
        self._connect = connect
        self._is_connected = is_connected
        self._security = security
        self._name = name
        self._method = method
        self._clock = asyncio.get_running_loop().time
        self._unreachable = OncePerMinute(_log, "Cannot reach another router", self._clock)
        self._dials: dict[Address, asyncio.Task[None]] = {}
        # The addresses that were found first and have no ended attempt.
        self._untried: set[str] = set()
        self.tried = asyncio.Event()
        """Set when the first attempts to connect to the addresses that were found first have ended."""

    async def close(self) -> None:
        """Close the connections that this router opened."""
        tasks = tuple(self._dials.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def run(self) -> None:
        """Find and dial the other routers until cancelled."""
        async with asyncio.TaskGroup() as group:
            found = await self._search()
            self._untried = {address(*where) for where in found}
            if not found:
                self.tried.set()
            while True:
                for where in self._dials.keys() - set(found):
                    self._dials.pop(where)
                for where in found:
                    if where not in self._dials:
                        self._dials[where] = group.create_task(self._dial(where))
                await asyncio.sleep(FIND_S)
                found = await self._search()

    async def _search(self) -> tuple[Address, ...]:
        return tuple(dict.fromkeys(Address(*each) for each in await self._find()))[: ROUTERS_MAX + 1]

    def on_attempt(self, shown: str) -> None:
        """Note that an attempt to connect to an address has ended, in a connection or without one."""
        self._untried.discard(shown)
        if not self._untried:
            self.tried.set()

    async def _dial(self, where: Address) -> None:
        """Keep a connection to an address while the address is found."""
        task = asyncio.current_task()
        known: str | None = None
        pause_s = 0.0
        began_s = reached_s = self._clock()
        while self._dials.get(where) is task and known != self._name:
            if known is not None and self._is_connected(known):
                reached_s = self._clock()
                await asyncio.sleep(_CHECK_S)
                continue
            if known is not None and self._clock() - began_s >= LASTING_S:
                pause_s = SHORTEST_BACKOFF_S
            await asyncio.sleep(pause_s)
            pause_s = min(max(2 * pause_s, SHORTEST_BACKOFF_S), LONGEST_BACKOFF_S)
            began_s = self._clock()
            try:
                known = await self._open(where)
                reached_s = self._clock()
            except Unreachable as error:
                known = None
                if self._clock() - reached_s >= UNREACHABLE_S:
                    self._unreachable.warn(1, address=address(*where), reason=str(error))
            self.on_attempt(address(*where))

    async def _open(self, where: Address) -> str | None:
        """Open a connection and serve it until it ends. Raises Unreachable."""
        try:
            channel = await self._channel(where)
        # The files of the certificate may be invalid at this moment, and the other router may not listen.
        except Exception as error:  # noqa: BLE001
            raise Unreachable(str(error)) from None
        # grpc-stubs does not know that these arguments are optional.
        open_stream: Any = channel.stream_stream(self._method)  # type: ignore[call-arg]
        try:
            call = open_stream()
            try:
                return await self._connect(call, address(*where))
            finally:
                call.cancel()
        finally:
            await channel.close(None)

    async def _channel(self, where: Address) -> grpc.aio.Channel:
        if self._security is None:
            return grpc.aio.insecure_channel(where.target, options=_OPTIONS)
        credentials, name = await self._security(*where)
        options = (*_OPTIONS, ("grpc.ssl_target_name_override", name))
        return grpc.aio.secure_channel(where.target, credentials, options=options)
