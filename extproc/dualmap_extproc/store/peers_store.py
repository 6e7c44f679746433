"""A store without a server: each router keeps what the connected routers publish (implements ``contract.Store``).

A router with connections to other routers, but without Redis, uses this store. Its state ends with the process: a
router that starts learns only what is published from then on. Each router decides by itself which of two bindings of
one session is valid; the pool's owner makes nearly all bindings, so routers rarely disagree.
"""

import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from dualmap.replicas.update import HotnessCounts, ReplicaUpdate, SharedBinding
from dualmap_edge.logs import OncePerMinute, get_logger
from dualmap_extproc.store.codec import (
    UnreadableUpdate,
    decode_report,
    decode_update,
    encode_report,
    encode_update,
)
from dualmap_extproc.store.contract import Answer, Claim, Failure, Post, Question
from dualmap_extproc.store.memory import MemoryStore

_VERSION: Final = 1
_LENGTH: Final = struct.Struct("<I")
# A larger post is sent in two parts, so that each is below the limit of messages between routers.
_PAYLOAD_BYTES_MAX: Final = 2**20
_NOTHING_COUNTED: Final = HotnessCounts(requests=0, nodes={})
# The exchange reads ten times a second, and it is the only reader.
_KEEP_S: Final = 10.0
_log = get_logger(__name__)


class PeersStore:
    """The published state of this router and of the connected routers.

    ``share`` sends bytes to every connected router, which passes them to ``on_shared``. ``clock`` returns seconds.
    ``serves`` returns whether this router serves a pool; posts about other pools are dropped.
    """

    def __init__(
        self, share: Callable[[bytes], None], serves: Callable[[str], bool], clock: Callable[[], float]
    ) -> None:
        self._share = share
        self._serves = serves
        self._kept = MemoryStore(clock)
        self._unreadable = OncePerMinute(_log, "Ignoring unreadable state of another router", clock)

    async def read(self, peer: str, questions: Sequence[Question]) -> tuple[Answer, ...]:
        """Return the answer to each question (``contract.Store``)."""
        self._kept.keep_pools(self._serves)
        return await self._kept.read(peer, questions)

    async def resolve(self, claims: Sequence[Claim]) -> tuple[tuple[SharedBinding, ...], ...]:
        """Return the valid bindings (``contract.Store``)."""
        return await self._kept.resolve(claims)

    async def publish(self, peer: str, posts: Sequence[Post]) -> None:
        """Publish to the connected routers (``contract.Store``).

        Each pool is a message of its own, which the other routers decode without a pause. The loads of 10,000 members
        take at most 3 MB.
        """
        for post in posts:
            payload = encode_post(post)
            if len(payload) <= _PAYLOAD_BYTES_MAX:
                self._share(payload)
                continue
            for part in (replace(post, loads=None, report=None), replace(post, update=None)):
                self._share(encode_post(part))

    async def close(self) -> None:
        """Do nothing: the connections are those of ``dualmap_extproc.peers`` (``contract.Store``)."""

    def on_shared(self, peer: str, payload: bytes) -> None:
        """Keep what another router published just now."""
        try:
            post = decode_post(payload)
        except UnreadableUpdate as error:
            self._unreadable.warn(1, router=peer, reason=str(error))
            return
        if self._serves(post.pool):
            self._kept.put(peer, [post])


class Unobserved:
    """Implements ``exchange.StoreObserver`` for this store, which has no server that may fail."""

    def exchanged(self, seconds: float) -> None:
        """Ignore an exchange."""

    def failed(self, failure: Failure) -> None:
        """Ignore a failure."""

    def unreadable(self, count: int) -> None:
        """Ignore unreadable entries: ``on_shared`` reads them."""

    def dropped(self, count: int) -> None:
        """Ignore dropped items."""


def encode_post(post: Post) -> bytes:
    """Return a post as bytes: a version, its pool, and three parts with lengths."""
    loads = None if post.loads is None else ReplicaUpdate(hotness=_NOTHING_COUNTED, loads=post.loads)
    parts = [
        _part(post.pool.encode()),
        _part(b"" if post.update is None else encode_update(post.update)),
        _part(b"" if loads is None else encode_update(loads)),
        _part(b"" if post.report is None else encode_report(post.report)),
    ]
    return bytes([_VERSION]) + b"".join(parts)


def decode_post(data: bytes) -> Post:
    """Return the post that ``encode_post`` encoded. Raises UnreadableUpdate."""
    if not data or data[0] != _VERSION:
        raise UnreadableUpdate(f"unknown version {data[:1].hex()}")
    try:
        pool, at = _read_part(data, 1)
        update, at = _read_part(data, at)
        loads, at = _read_part(data, at)
        report, at = _read_part(data, at)
        if at != len(data):
            raise UnreadableUpdate(f"{len(data) - at} unexpected bytes at the end")
        return Post(
            pool=pool.decode(),
            keep_s=_KEEP_S,
            update=decode_update(update) if update else None,
            loads=decode_update(loads).loads if loads else None,
            report=decode_report(report) if report else None,
        )
    except (struct.error, UnicodeDecodeError) as error:
        raise UnreadableUpdate(str(error)) from None


def _part(data: bytes) -> bytes:
    return _LENGTH.pack(len(data)) + data


def _read_part(data: bytes, at: int) -> tuple[bytes, int]:
    (length,) = _LENGTH.unpack_from(data, at)
    at += _LENGTH.size
    if length > len(data) - at:
        raise UnreadableUpdate(f"a part of {length} bytes, of which {len(data) - at} are there")
    return data[at : at + length], at + length
