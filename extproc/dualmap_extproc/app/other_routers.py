"""The other routers: the connections to them, and the exchange of replication updates with them."""

import asyncio
from collections.abc import Callable, Collection, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Final

from dualmap.ownership.messages import Message
from dualmap_extproc.autoscaling.pool_demand import PoolDemand
from dualmap_extproc.peers.addresses import NamedAddresses
from dualmap_extproc.peers.peers import Peers
from dualmap_extproc.request.picker import Picker
from dualmap_extproc.settings import Settings
from dualmap_extproc.store.announcement import Announcement
from dualmap_extproc.store.exchange import SHORTEST_HISTORY_S, Exchange, history_s
from dualmap_extproc.store.metrics import StoreMetrics
from dualmap_extproc.store.peers_store import PeersStore, Unobserved
from dualmap_extproc.store.target import target_of
from dualmap_extproc.telemetry.metrics import Metrics
from dualmap_extproc.transport.grpc_server import Handler
from dualmap_extproc.transport.tls import peer_security

CONNECT_S: Final = 2.0
"""The longest time that a starting router waits for its first attempts to connect to the other routers."""
# The interval in which a router checks whether it knows enough of the past to own pools.
_WARM_CHECK_S: Final = 0.2


class OtherRouters:
    """The connections to the other routers and the exchange with them; both are None if this router is the only one.

    ``name`` is this router's name among the routers. The picker needs ``send``, and the connections need the picker:
    ``connect`` therefore follows after the picker is made.
    """

    def __init__(self, settings: Settings, name: str) -> None:
        self._settings = settings
        self._name = name
        self._addresses = _RouterAddresses(settings, name)
        self.peers: Peers | None = None
        self.exchange: Exchange | None = None

    @property
    def exist(self) -> bool:
        """Whether the settings name a way to other routers."""
        return bool(self._settings.peers) or self._settings.redis is not None

    def connect(self, picker: Picker, pool_demand: PoolDemand, metrics: Metrics) -> None:
        """Make the connections and the exchange, if other routers exist. Raises TlsError."""
        if not self.exist:
            return
        clock = asyncio.get_running_loop().time
        settings = self._settings
        peers_store = PeersStore(self._share, lambda pool: picker.pool(pool) is not None, clock)
        peers = self.peers = Peers(
            picker,
            name=self._name,
            hash_key=settings.hash_key,
            find=self._addresses.find,
            security=peer_security(settings.tls, settings.tls_client_ca),
            on_shared=peers_store.on_shared,
        )
        metrics.show_peers(lambda: len(peers.names))
        self.exchange = _exchange(settings, peers_store, picker, pool_demand, metrics, self._name)

    def send(self, pool: str, peer: str, message: Message) -> None:
        """Send a message about a pool soon; drop it if there is no connection to the router ``peer``."""
        if self.peers is not None:
            self.peers.send(pool, peer, message)

    def _share(self, payload: bytes) -> None:
        if self.peers is not None:
            self.peers.share(payload)

    def handlers(self) -> Sequence[Handler]:
        """Return the gRPC services that the other routers call."""
        return () if self.peers is None else (self.peers.handler(),)

    def store_lost_s(self) -> float | None:
        """Return the seconds since the store became unreachable; None while it is reachable, and without a store."""
        return None if self.exchange is None else self.exchange.lost_for_s

    def runs(self, picker: Picker, grpc_port: int) -> Sequence[Coroutine[Any, Any, None]]:
        """Return what runs, without an end, while this router serves on ``grpc_port``."""
        if self.peers is None or self.exchange is None:
            return ()
        self._addresses.listen(grpc_port)
        history = None if self._settings.redis is None else self.exchange
        return self.exchange.run(), _run_peers(self.peers, picker, history)

    async def tried(self) -> None:
        """Wait until the first attempts to connect have ended, for CONNECT_S at most.

        A router that serves before it knows the others decides about pools that another router owns.
        """
        if self.peers is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(CONNECT_S):
                    await self.peers.tried()

    def leave(self) -> None:
        """Announce that this router is about to end."""
        if self.peers is not None:
            self.peers.leave()

    async def end(self) -> None:
        """Wait until the other routers have received the last messages; send no further ones."""
        if self.exchange is not None and self._settings.redis is None:
            await self.exchange.leave()
        if self.peers is not None:
            await self.peers.end()

    async def close(self) -> None:
        """Publish that this router has no load any more, and close all connections."""
        if self.exchange is not None:
            await self.exchange.leave()
        if self.peers is not None:
            await self.peers.close()
        await self._addresses.close()


def _exchange(
    settings: Settings, peers_store: PeersStore, picker: Picker, pool_demand: PoolDemand, metrics: Metrics, name: str
) -> Exchange:
    """Return the exchange of replication updates with the other routers; they identify this router by ``name``.

    Without Redis, the routers send the updates to each other.
    """
    clock = asyncio.get_running_loop().time
    if settings.redis is None:
        shown = "the other routers"
        return Exchange(picker, peers_store, Unobserved(), reporter=pool_demand, peer=name, clock=clock, shown=shown)
    from dualmap_extproc.store.redis import RedisStore  # This import takes 0.4 s.

    target = target_of(settings.redis)
    observer = StoreMetrics(metrics.registry)
    return Exchange(
        picker, RedisStore(target), observer, reporter=pool_demand, peer=name, clock=clock, shown=target.shown
    )


async def _run_peers(peers: Peers, picker: Picker, history: Exchange | None) -> None:
    """Connect to the other routers, and announce when this router knows enough of the past to own pools.

    ``history`` reads the past from Redis. Without it, this router knows what happened since its start.
    """
    async with asyncio.TaskGroup() as group:
        group.create_task(peers.run())
        clock = asyncio.get_running_loop().time
        began_s, warm = clock(), False
        while not warm:
            await asyncio.sleep(_WARM_CHECK_S)
            if history is not None:
                warm = history.has_read_history
            else:
                longest_s = max((history_s(pool) for pool in picker.pools), default=SHORTEST_HISTORY_S)
                warm = clock() - began_s >= longest_s
        peers.warm()


class _RouterAddresses:
    """Finds the addresses of the other routers: those of ``--peer``, else those that routers announce in Redis.

    ``name`` is this router's name among the routers.
    """

    def __init__(self, settings: Settings, name: str) -> None:
        self._settings = settings
        self._name = name
        self._named = NamedAddresses(settings.peers)
        self._announcement: Announcement | None = None
        self._close: Callable[[], Coroutine[Any, Any, object]] | None = None

    def listen(self, grpc_port: int) -> None:
        """Begin to announce this router, which listens on ``grpc_port``, if routers find each other in Redis."""
        if self._settings.peers or self._settings.redis is None:
            return
        from dualmap_extproc.store.redis import RedisStore  # This import takes 0.4 s.

        target = target_of(self._settings.redis)
        # The exchange has a client of its own, because a failed call closes all connections of its client.
        store = RedisStore(target)
        self._close = store.close
        host = self._settings.host
        self._announcement = Announcement(store, name=self._name, host=host, port=grpc_port, target=target)

    async def find(self) -> Collection[tuple[str, int]]:
        """Return the addresses of the routers, this one possibly among them."""
        return await (self._named if self._announcement is None else self._announcement).find()

    async def close(self) -> None:
        """Close the connections to Redis."""
        if self._close is not None:
            await self._close()
