"""The store in a Redis server (6.2 or later) or a Redis Cluster. Only this module imports the redis library.

docs/state.md describes the keys. In a Redis Cluster, all keys of a pool have the same hash tag, and no command uses
keys of two pools. The first call creates the client. Every failure discards the client, so that no broken connection is
reused.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final, TypeVar

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, MovedError, NoPermissionError, OutOfMemoryError, ReadOnlyError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from dualmap.replicas.peers import PEER_TTL_S
from dualmap.replicas.update import HotnessCounts, ReplicaUpdate, SharedBinding
from dualmap.scaling.reports import REMEMBERED_S, ROUTERS_MAX
from dualmap_extproc.store.codec import (
    LONGEST_S,
    UnreadableUpdate,
    decode_report,
    decode_update,
    encode_report,
    encode_update,
)
from dualmap_extproc.store.contract import (
    HISTORY_ENTRIES_MAX,
    PAGE_ENTRIES,
    Answer,
    Claim,
    Entry,
    Failure,
    LoadEntry,
    Post,
    Question,
    ReportEntry,
    StoreError,
)
from dualmap_extproc.store.scripts import ANNOUNCE, PUBLISH, READ, RESOLVE
from dualmap_extproc.store.target import Target

CONNECT_S: Final = 1.0
REPLY_S: Final = 0.5
# The timeout of a whole call. The library's timeouts limit only single steps, such as reading a cluster's map.
_CALL_S: Final = 2.0
_CLUSTER_RETRIES: Final = 3
# The most bytes of a pool's updates: five minutes of 350 requests per second, with 8000 tokens each.
_UPDATES_BYTES_MAX: Final = 64 * 2**20
# Redis keeps loads longer than they are valid, so that routers with delayed reads still find a router's last loads.
_LOADS_KEEP_S: Final = 3 * PEER_TTL_S
# Redis trims entries by age. These limits apply only if the server's clock was set back.
_LOADS_ENTRIES_MAX: Final = 4096
_LOADS_BYTES_MAX: Final = 16 * 2**20
_LOADS_PAGE_ENTRIES: Final = 256
# The corresponding limits of demand reports: a minute of a hundred routers.
_REPORTS_KEEP_S: Final = REMEMBERED_S + 2 * PEER_TTL_S
_REPORTS_ENTRIES_MAX: Final = 8192
_REPORTS_BYTES_MAX: Final = 2**20
_REPORTS_PAGE_ENTRIES: Final = 1024
_NOTHING_COUNTED: Final = HotnessCounts(requests=0, nodes={})
# The largest entry that a router reads. The loads of 10,000 members take at most 3 MB, and a prompt of 500,000 blocks
# takes 4 MB. The READ script removes a larger entry, because a page of such entries takes longer than REPLY_S.
_ENTRY_BYTES_MAX: Final = 4 * 2**20
# Routers announce their addresses once a second. The limits apply if another client of the server writes addresses.
_ADDRESS_KEEP_S: Final = 5.0
_ADDRESS_ENTRIES_MAX: Final = 1024
_ADDRESS_BYTES_MAX: Final = 512
# The largest value of a session's key: more than the longest member id and four numbers.
_BINDING_BYTES_MAX: Final = 1024
# Limits of a binding's values: greater than any value of a router, and below the limits of the codec.
_VERSIONS: Final = 2**31
_TOKENS: Final = 2**53
# Texts of errors that a script returned. For other errors, the library raises specific classes.
_FAILURES_BY_TEXT: Final = {
    "OOM ": Failure.FULL,
    "READONLY ": Failure.READ_ONLY,
    "NOAUTH ": Failure.DENIED,
    # The first text is that of Redis 6.2, the second that of later versions.
    "can't run this command": Failure.DENIED,
    "ACL failure": Failure.DENIED,
}
# The first match applies, because authentication errors and timeouts are also connection errors.
_FAILURES_BY_CLASS: Final = (
    ((AuthenticationError, NoPermissionError), Failure.DENIED),
    ((OutOfMemoryError,), Failure.FULL),
    ((ReadOnlyError,), Failure.READ_ONLY),
    ((RedisTimeoutError, TimeoutError), Failure.TIMEOUT),
    ((RedisConnectionError, OSError), Failure.CONNECTION),
)

_Value = TypeVar("_Value")
_Command = tuple[str | bytes | int, ...]


class RedisStore:
    """A store in the Redis server at ``target`` (contract.Store)."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._client: Redis | RedisCluster | None = None
        self._clustered = False

    async def read(self, peer: str, questions: Sequence[Question]) -> tuple[Answer, ...]:
        """Return the answer to each question (``contract.Store``)."""
        replies = await self._run([_read(question) for question in questions])
        with _replies_as_scripted():
            return tuple(_answer(peer, *each) for each in zip(questions, replies, strict=True))

    async def resolve(self, claims: Sequence[Claim]) -> tuple[tuple[SharedBinding, ...], ...]:
        """Return the valid bindings (``contract.Store``)."""
        replies = await self._run([_resolve(claim) for claim in claims])
        with _replies_as_scripted():
            return tuple(
                tuple(
                    # The script may accept a value that is not a valid binding. The router ignores such a value.
                    _binding(binding.session, value, int(now_ms)) or binding
                    for binding, value in zip(claim.bindings, values, strict=True)
                )
                for claim, (now_ms, values) in zip(claims, replies, strict=True)
            )

    async def publish(self, peer: str, posts: Sequence[Post]) -> None:
        """Publish to the other replicas (``contract.Store``)."""
        await self._run([_publish(peer, post) for post in posts])

    async def announce(self, name: str, address: str) -> tuple[str, ...]:
        """Announce a router's address; return all routers' addresses (``announcement.AddressStore``)."""
        limits = (int(1000 * _ADDRESS_KEEP_S), _ADDRESS_ENTRIES_MAX, ROUTERS_MAX + 1, _ADDRESS_BYTES_MAX)
        replies = await self._run([("EVAL", ANNOUNCE, 1, ADDRESSES_KEY, name, address, *limits)])
        with _replies_as_scripted():
            return tuple(address.decode(errors="replace") for address in replies[0])

    async def close(self) -> None:
        """Close the connections (``contract.Store``)."""
        client, self._client = self._client, None
        if client is not None:
            # The shield is necessary because no other code closes these connections if this task is cancelled.
            await asyncio.shield(client.aclose())

    async def _run(self, commands: Sequence[_Command]) -> list[Any]:
        """Send commands in one pipeline and return their replies. Raises StoreError."""
        try:
            async with asyncio.timeout(_CALL_S):
                try:
                    replies = await self._send(commands)
                except MovedError:
                    # A node of a cluster answers MOVED for keys of another node.
                    await self.close()
                    self._clustered = True
                    replies = await self._send(commands)
            _raise_if_cancelled()
            return replies
        # The clause covers all exceptions: if the server is not Redis, the library's parser raises various errors.
        except Exception as error:  # noqa: BLE001
            await self._drop()
            _raise_if_cancelled()
            raise self._failed(error) from None
        except asyncio.CancelledError:
            await self._drop()
            raise

    async def _send(self, commands: Sequence[_Command]) -> list[Any]:
        if self._client is None:
            self._client = _client(self._target, clustered=self._clustered)
        # The client reads all replies before it raises an error, so that the connection stays in a known state.
        pipeline = self._client.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        replies = await pipeline.execute(raise_on_error=False)
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
        return replies

    async def _drop(self) -> None:
        try:
            await self.close()
        # The close of a broken connection may fail. No connection remains in this case.
        except Exception:  # noqa: BLE001
            self._client = None

    def _failed(self, error: Exception) -> StoreError:
        text = str(error) or type(error).__name__
        if self._target.password:
            text = text.replace(self._target.password, "***")
        return StoreError(_failure(error, text), text)


def _raise_if_cancelled() -> None:
    """Raise CancelledError if the task was cancelled.

    The library may treat a cancellation as its own timeout. The library also loses a cancellation that arrives together
    with a reply.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


@contextmanager
def _replies_as_scripted() -> Iterator[None]:
    """Raise StoreError for a reply that does not have the form of the scripts' replies.

    Such a reply means that the server is not Redis, or does not support scripts.
    """
    try:
        yield
    except (TypeError, ValueError, AttributeError):
        raise StoreError(Failure.REPLY, "the server sent an unexpected reply; is the server Redis?") from None


ADDRESSES_KEY: Final = "dualmap:1:{routers}:addresses"
"""The key of the stream of the routers' addresses. No pool has this hash tag, because a pool's id has a slash."""


def updates_key(pool: str) -> str:
    """Return the key of the stream of a pool's updates; ``pool`` is ``namespace/name``."""
    return f"dualmap:1:{{{pool}}}:news"


def loads_key(pool: str) -> str:
    """Return the key of the stream of the routers' loads."""
    return f"dualmap:1:{{{pool}}}:loads"


def reports_key(pool: str) -> str:
    """Return the key of the stream of the routers' demand reports."""
    return f"dualmap:1:{{{pool}}}:demand"


def session_key(pool: str, session: int) -> str:
    """Return the key of a session's binding."""
    return f"dualmap:1:{{{pool}}}:session:{session:016x}"


def _read(question: Question) -> _Command:
    updates_cursor, loads_cursor, reports_cursor = (question.cursor or "  ").split(" ")
    sessions = (session_key(question.pool, session) for session in question.wanted)
    keys = (updates_key(question.pool), loads_key(question.pool), reports_key(question.pool), *sessions)
    update = (updates_cursor, int(1000 * question.window_s), PAGE_ENTRIES)
    loads = (loads_cursor, int(1000 * PEER_TTL_S), _LOADS_PAGE_ENTRIES)
    reports = (reports_cursor, int(1000 * REMEMBERED_S), _REPORTS_PAGE_ENTRIES)
    return ("EVAL", READ, len(keys), *keys, *update, *loads, *reports, _ENTRY_BYTES_MAX, _BINDING_BYTES_MAX)


def _answer(peer: str, question: Question, reply: Any) -> Answer:
    """Return the answer that a reply contains, without entries of ``peer`` itself."""
    now, unreadable, oversized, streams, values = reply
    (updates_cursor, update), (loads_cursor, loads), (reports_cursor, reports) = streams
    now_ms = int(now)
    entries: list[Entry] = []
    for id_, fields in update:
        entry = _read_entry(fields, decode_update)
        if entry is None:
            unreadable += 1
        elif entry[0] != peer:
            # Routers publish loads in another stream, so loads in this stream are ignored.
            age_s = _age_s(id_, now_ms)
            entries.append(Entry(peer=entry[0], update=replace(entry[1], loads=None), age_s=age_s))
    loads_by_peer: dict[str, LoadEntry] = {}
    for id_, fields in loads:
        entry = _read_entry(fields, decode_update)
        if entry is None:
            unreadable += 1
        elif entry[0] != peer and (age_s := _age_s(id_, now_ms)) < PEER_TTL_S:
            loads_by_peer[entry[0]] = LoadEntry(peer=entry[0], loads=entry[1].loads or {}, age_s=age_s)
    reports_by_peer: dict[str, ReportEntry] = {}
    for id_, fields in reports:
        report = _read_entry(fields, decode_report)
        if report is None:
            unreadable += 1
        elif report[0] != peer and (age_s := _age_s(id_, now_ms)) < REMEMBERED_S:
            reports_by_peer[report[0]] = ReportEntry(peer=report[0], report=report[1], age_s=age_s)
    bindings = [_binding(session, value, now_ms) for session, value in zip(question.wanted, values, strict=True)]
    known = tuple(binding for binding in bindings if binding is not None)
    return Answer(
        cursor=" ".join(cursor.decode() for cursor in (updates_cursor, loads_cursor, reports_cursor)),
        entries=tuple(entries),
        loads=tuple(loads_by_peer.values()),
        reports=tuple(reports_by_peer.values()),
        bindings=known,
        more=len(update) == PAGE_ENTRIES or len(loads) == _LOADS_PAGE_ENTRIES or len(reports) == _REPORTS_PAGE_ENTRIES,
        unreadable=unreadable + oversized + sum(value is not None for value in values) - len(known),
        oversized=oversized,
    )


def _read_entry(fields: list[bytes], decode: Callable[[bytes], _Value]) -> tuple[str, _Value] | None:
    """Return the replica and the value in an entry's fields, or None if the fields are invalid."""
    values = dict(zip(fields[::2], fields[1::2], strict=False))
    try:
        return values[b"p"].decode(), decode(values[b"n"])
    except (KeyError, UnicodeDecodeError, UnreadableUpdate):
        return None


def _client(target: Target, *, clustered: bool) -> Redis | RedisCluster:
    options: dict[str, Any] = {
        "username": target.user,
        "password": target.password,
        "socket_connect_timeout": CONNECT_S,
        "socket_timeout": REPLY_S,
        "protocol": 2,
    }
    if target.tls:
        options |= {"ssl": True, "ssl_ca_certs": target.ca_file and str(target.ca_file), "ssl_check_hostname": True}
    if clustered:
        retry = Retry(NoBackoff(), _CLUSTER_RETRIES)
        return RedisCluster(host=target.host, port=target.port, retry=retry, **options)
    if target.path:
        options["unix_socket_path"] = target.path
    # The library must not retry, because it could send a command twice. The exchange retries instead.
    return Redis(host=target.host, port=target.port, db=target.db, retry=Retry(NoBackoff(), 0), **options)


def _resolve(claim: Claim) -> _Command:
    keys = [session_key(claim.pool, binding.session) for binding in claim.bindings]
    values: list[str | int] = []
    for binding in claim.bindings:
        moved_ago_ms = int(1000 * min(max(binding.moved_ago_s, 0.0), LONGEST_S))
        values += [binding.version, moved_ago_ms, binding.tokens, binding.host]
    return ("EVAL", RESOLVE, len(keys), *keys, max(1, int(1000 * claim.ttl_s)), *values, _BINDING_BYTES_MAX)


def _publish(peer: str, post: Post) -> _Command:
    keys: list[str] = []
    streams: list[int | bytes] = []
    # The loads come first. If Redis rejects the loads, the script does not write the update. The update therefore does
    # not count twice when the router sends it again.
    if post.loads is not None:
        keys.append(loads_key(post.pool))
        entry = encode_update(ReplicaUpdate(hotness=_NOTHING_COUNTED, loads=post.loads))
        streams += [int(1000 * _LOADS_KEEP_S), _LOADS_ENTRIES_MAX, _LOADS_BYTES_MAX, entry]
    if post.report is not None:
        keys.append(reports_key(post.pool))
        entry = encode_report(post.report)
        streams += [int(1000 * _REPORTS_KEEP_S), _REPORTS_ENTRIES_MAX, _REPORTS_BYTES_MAX, entry]
    if post.update is not None:
        keys.append(updates_key(post.pool))
        entry = encode_update(post.update)
        streams += [max(1, int(1000 * post.keep_s)), HISTORY_ENTRIES_MAX, _UPDATES_BYTES_MAX, entry]
    return ("EVAL", PUBLISH, len(keys), *keys, peer, *streams)


def _binding(session: int, value: bytes | None, now_ms: int) -> SharedBinding | None:
    """Return the binding in a key's value, or None for an absent or invalid value."""
    try:
        form, version, moved_ms, tokens, host = (value or b"").decode().split(" ", 4)
        binding = SharedBinding(
            session=session,
            host=host,
            tokens=int(tokens),
            version=int(version),
            moved_ago_s=min(max(0, now_ms - int(moved_ms)) / 1000, LONGEST_S),
        )
    except (ValueError, OverflowError):  # UnicodeDecodeError is a ValueError
        return None
    # The codec cannot encode a binding outside these limits for the other replicas.
    within = 0 <= binding.version < _VERSIONS and 0 <= binding.tokens < _TOKENS
    return binding if form == "1" and within else None


def _age_s(id_: bytes, now_ms: int) -> float:
    return max(0, now_ms - int(id_.partition(b"-")[0])) / 1000


def _failure(error: Exception, text: str) -> Failure:
    for word, failure in _FAILURES_BY_TEXT.items():
        if word in text:
            return failure
    for classes, failure in _FAILURES_BY_CLASS:
        if isinstance(error, classes):
            return failure
    return Failure.REPLY
