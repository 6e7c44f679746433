"""Several routers' peers on loopback in one process, for tests."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager

from dualmap.ownership.messages import Declined, Message
from dualmap_extproc.peers.dialer import Address, Security
from dualmap_extproc.peers.peers import Peers
from dualmap_extproc.request.ending import AccessLogEntry
from dualmap_extproc.transport.server import Server
from dualmap_extproc.transport.tls import Certificates
from extproc import transports
from ports import reserved_port

KEY = b"one key of all routers"
POOL = "llm/chat"


class Heard:
    """A listener that keeps what it hears."""

    def __init__(self) -> None:
        self.messages: list[tuple[str, str, Message]] = []
        self.routers: list[set[str]] = []
        self.lost: list[str] = []
        self.entries: list[AccessLogEntry] = []
        self.orphans: list[AccessLogEntry] = []
        self.shared: list[tuple[str, bytes]] = []
        self.on_connected: Callable[[], None] = lambda: None
        self.fails = False

    def on_message(self, now: float, pool: str, peer: str, message: Message) -> None:
        if isinstance(message, Declined) and message.request_id == "cannot be applied":
            raise ValueError(message.request_id)
        self.messages.append((pool, peer, message))

    def on_routers(self, now: float, routers: Collection[str]) -> None:
        if self.fails:
            raise ValueError("on_routers")
        self.routers.append(set(routers))
        if len(routers) > 1:
            self.on_connected()

    def on_router_lost(self, now: float, peer: str) -> None:
        if self.fails:
            raise ValueError("on_router_lost")
        self.lost.append(peer)

    def access_log(self, now: float, entry: AccessLogEntry) -> None:
        self.entries.append(entry)

    def on_orphan(self, now: float, entry: AccessLogEntry) -> None:
        self.orphans.append(entry)

    def on_shared(self, peer: str, payload: bytes) -> None:
        self.shared.append((peer, payload))

    @property
    def ids(self) -> list[str]:
        return [message.request_id for _, _, message in self.messages if isinstance(message, Declined)]


class Router:
    """A router that has nothing but its peers; ``addresses`` are those that it finds."""

    def __init__(
        self, name: str, *, key: bytes = KEY, security: Security | None = None, heard: Heard | None = None
    ) -> None:
        self.name = name
        self.heard = heard or Heard()
        self.addresses: list[Address] = []
        self.peers = Peers(
            self.heard,
            name=name,
            hash_key=key,
            find=lambda: self.find(),
            security=security,
            on_shared=self.heard.on_shared,
        )
        self.address = Address("127.0.0.1", 0)
        self._server: Server | None = None
        self._task: asyncio.Task[None] | None = None

    async def listen(self, certificates: Certificates | None = None, port: int = 0) -> None:
        self._server = transports.server((self.peers.handler(),))
        self.address = Address("127.0.0.1", await self._server.bind("127.0.0.1", port or reserved_port(), certificates))
        await self._server.start()

    def start(self, *addresses: Address) -> None:
        self.addresses[:] = addresses
        self._task = asyncio.create_task(self.peers.run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self.peers.close()
        if self._server is not None:
            await self._server.close()

    async def find(self) -> Collection[tuple[str, int]]:
        return self.addresses


def connected(*some: Router) -> bool:
    """Return whether all of the routers are connected to each other, and to no other router."""
    names = {each.name for each in some}
    return all(set(each.peers.names) == names - {each.name} for each in some)


@asynccontextmanager
async def routers(*names: str, all_know_all: bool = True, **options) -> AsyncIterator[list[Router]]:
    """Listening routers; if ``all_know_all``, each finds the addresses of all, its own among them."""
    some = [Router(name, **options) for name in names]
    try:
        for each in some:
            await each.listen()
        if all_know_all:
            for each in some:
                each.start(*(other.address for other in some))
        yield some
    finally:
        for each in some:
            await each.stop()
