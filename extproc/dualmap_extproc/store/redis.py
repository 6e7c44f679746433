"""The store in a Redis server (6.2 or later) or Redis Cluster; the only module that knows the redis library.

docs/state.md describes the keys. All of a pool's keys carry the same hash tag, and no command touches two pools.
The client is made at the first call and made anew after every failure, so that nothing half-done is ever reused.
"""

import asyncio
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, MovedError, NoPermissionError, OutOfMemoryError, ReadOnlyError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from dualmap.news import SharedBinding
from dualmap_extproc.store.codec import LONGEST_S, UnreadableNews, decode_news, encode_news
from dualmap_extproc.store.contract import (
    HISTORY_ENTRIES_MAX,
    Answer,
    Claim,
    Entry,
    Failure,
    Post,
    Question,
    StoreError,
)
from dualmap_extproc.store.scripts import HEAR, PUBLISH, SETTLE
from dualmap_extproc.store.target import Target

CONNECT_S: Final = 1.0
REPLY_S: Final = 0.5
# Over the library's own timeouts, which are for one step each: a cluster's map has to be read before it is asked.
_CALL_S: Final = 2.0
_CLUSTER_RETRIES: Final = 3
_PAGE_ENTRIES: Final = 64
# Entries are trimmed by age; this bounds a stream whose server's clock was set back.
_STREAM_ENTRIES_MAX: Final = 4 * HISTORY_ENTRIES_MAX
# Above what any binding counts, below what the codec can write.
_VERSIONS: Final = 2**31
_TOKENS: Final = 2**53
# What a refusal's text holds where a script passed it on; else the library knows it by its class.
_FAILURES_BY_TEXT: Final = {
    "OOM ": Failure.FULL,
    "READONLY ": Failure.READ_ONLY,
    "NOAUTH ": Failure.DENIED,
    # Redis 6.2, and those since.
    "can't run this command": Failure.DENIED,
    "ACL failure": Failure.DENIED,
}
# The first that fits holds: errors of authentication and timeouts are connection errors as well.
_FAILURES_BY_CLASS: Final = (
    ((AuthenticationError, NoPermissionError), Failure.DENIED),
    ((OutOfMemoryError,), Failure.FULL),
    ((ReadOnlyError,), Failure.READ_ONLY),
    ((RedisTimeoutError, TimeoutError), Failure.TIMEOUT),
    ((RedisConnectionError, OSError), Failure.CONNECTION),
)

_Command = tuple[str | bytes | int, ...]


class RedisStore:
    """Keeps news and bindings in the Redis server at ``target`` (contract.Store)."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._client: Redis | RedisCluster | None = None
        self._clustered = False

    async def hear(self, peer: str, questions: Sequence[Question]) -> tuple[Answer, ...]:
        """Answer each question (Store)."""
        hearings = [_Hearing(peer, question) for question in questions]
        unfinished = hearings
        while unfinished:
            replies = await self._run([hearing.command() for hearing in unfinished])
            with _replies_as_scripted():
                unfinished = [each for each, reply in zip(unfinished, replies, strict=True) if each.take_reply(reply)]
        return tuple(hearing.answer() for hearing in hearings)

    async def settle(self, claims: Sequence[Claim]) -> tuple[tuple[SharedBinding, ...], ...]:
        """Return the bindings that hold (Store)."""
        replies = await self._run([_settle(claim) for claim in claims])
        with _replies_as_scripted():
            return tuple(
                tuple(
                    # Without a binding in it, the value has passed for one in the script alone: it is junk.
                    _binding(binding.session, value, int(now_ms)) or binding
                    for binding, value in zip(claim.bindings, values, strict=True)
                )
                for claim, (now_ms, values) in zip(claims, replies, strict=True)
            )

    async def publish(self, peer: str, posts: Sequence[Post]) -> None:
        """Append news to the streams of their pools (Store)."""
        await self._run([_publish(peer, post) for post in posts])

    async def close(self) -> None:
        """Close the connections (Store)."""
        client, self._client = self._client, None
        if client is not None:
            # To the end, whatever becomes of this task: nobody else knows of these connections.
            await asyncio.shield(client.aclose())

    async def _run(self, commands: Sequence[_Command]) -> list[Any]:
        """Send commands in one go and return their replies. Raises StoreError."""
        try:
            async with asyncio.timeout(_CALL_S):
                try:
                    return await self._send(commands)
                except MovedError:
                    # One node of a cluster tells so when it is asked for another's keys.
                    await self.close()
                    self._clustered = True
                    return await self._send(commands)
        # Whatever the library meets: where there is no Redis at all, its parser raises more than its own errors.
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
        # Together in any case, since an error reply must not hide the others' success from the client's bookkeeping.
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
        # A connection that is broken already may say so again; there is nothing left to close then.
        except Exception:  # noqa: BLE001
            self._client = None

    def _failed(self, error: Exception) -> StoreError:
        text = str(error) or type(error).__name__
        if self._target.password:
            text = text.replace(self._target.password, "***")
        return StoreError(_failure(error, text), text)


def _raise_if_cancelled() -> None:
    """Raise CancelledError if the task was cancelled: the library can take that for a timeout of its own."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


@contextmanager
def _replies_as_scripted() -> Iterator[None]:
    """Raise StoreError for replies of another form than our scripts': that is no Redis, or none that knows scripts."""
    try:
        yield
    except (TypeError, ValueError, AttributeError):
        raise StoreError(Failure.REPLY, "the server's reply has another form than Redis's") from None


def stream_key(pool: str) -> str:
    """Return the key of a pool's stream; ``pool`` is ``namespace/name``."""
    return f"dualmap:1:{{{pool}}}:news"


def session_key(pool: str, session: int) -> str:
    """Return the key of a session's binding."""
    return f"dualmap:1:{{{pool}}}:session:{session:016x}"


class _Hearing:
    """Reads a stream page by page: forward from a cursor, or backward from its end as far as the window goes."""

    def __init__(self, peer: str, question: Question) -> None:
        self._peer = peer
        self._question = question
        self._cursor = question.cursor or ""
        self._oldest = ""
        self._heard = 0
        self._entries: list[Entry] = []
        self._bindings: list[SharedBinding] = []
        self._unreadable = 0

    def command(self) -> _Command:
        """Return the command that reads the next page, and with the first one the bindings."""
        question = self._question
        sessions = [session_key(question.pool, session) for session in self._wanted()]
        if question.cursor is None:
            page = ("XREVRANGE", f"({self._oldest}" if self._oldest else "+", "-")
        else:
            page = ("XRANGE", f"({self._cursor}", "+")
        cursor_ms = self._cursor.partition("-")[0] or 0
        keys = (stream_key(question.pool), *sessions)
        return ("EVAL", HEAR, len(keys), *keys, *page, _PAGE_ENTRIES, cursor_ms)

    def take_reply(self, reply: Any) -> bool:
        """Take a page; say whether there may be another."""
        now, mended, newest, entries, values = reply
        now_ms = int(now)
        self._unreadable += mended
        for session, value in zip(self._wanted(), values, strict=True):
            binding = _binding(session, value, now_ms)
            if binding is not None:
                self._bindings.append(binding)
            elif value is not None:
                self._unreadable += 1
        backward = self._question.cursor is None
        since_ms = now_ms - 1000 * self._question.window_s if backward else -math.inf
        for id_, fields in entries:
            if _milliseconds(id_) < since_ms:
                break
            self._take_entry(_milliseconds(id_), fields, now_ms)
        first = not self._heard
        self._heard += len(entries)
        if entries and (first or not backward):
            self._cursor = entries[0 if backward else -1][0].decode()
        elif newest and newest.decode() != self._cursor:
            self._cursor = newest.decode()
        if entries:
            self._oldest = entries[-1][0].decode()
        reached = backward and entries and _milliseconds(entries[-1][0]) < since_ms
        return len(entries) == _PAGE_ENTRIES and self._heard < HISTORY_ENTRIES_MAX and not reached

    def answer(self) -> Answer:
        """Return what was read."""
        if self._question.cursor is None:
            self._entries.reverse()
        return Answer(
            cursor=self._cursor or "0-0",
            entries=tuple(self._entries),
            bindings=tuple(self._bindings),
            unreadable=self._unreadable,
        )

    def _wanted(self) -> tuple[int, ...]:
        return () if self._heard else self._question.wanted

    def _take_entry(self, at_ms: int, fields: list[bytes], now_ms: int) -> None:
        values = dict(zip(fields[::2], fields[1::2], strict=False))
        try:
            peer = values[b"p"].decode()
            if peer != self._peer:
                news = decode_news(values[b"n"])
                self._entries.append(Entry(peer=peer, news=news, age_s=max(0, now_ms - at_ms) / 1000))
        except (KeyError, UnicodeDecodeError, UnreadableNews):
            self._unreadable += 1


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
    # The exchange tries again by itself; what the library retries would be sent twice.
    return Redis(host=target.host, port=target.port, db=target.db, retry=Retry(NoBackoff(), 0), **options)


def _settle(claim: Claim) -> _Command:
    keys = [session_key(claim.pool, binding.session) for binding in claim.bindings]
    values: list[str | int] = []
    for binding in claim.bindings:
        moved_ago_ms = int(1000 * min(max(binding.moved_ago_s, 0.0), LONGEST_S))
        values += [binding.version, moved_ago_ms, binding.tokens, binding.host]
    return ("EVAL", SETTLE, len(keys), *keys, max(1, int(1000 * claim.ttl_s)), *values)


def _publish(peer: str, post: Post) -> _Command:
    keep_ms = max(1, int(1000 * post.keep_s))
    return ("EVAL", PUBLISH, 1, stream_key(post.pool), keep_ms, _STREAM_ENTRIES_MAX, peer, encode_news(post.news))


def _binding(session: int, value: bytes | None, now_ms: int) -> SharedBinding | None:
    """Return the binding that a key's value holds; None for none and for what is no binding."""
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
    # What is out of bounds could not be told to the other replicas.
    within = 0 <= binding.version < _VERSIONS and 0 <= binding.tokens < _TOKENS
    return binding if form == "1" and within else None


def _milliseconds(id_: bytes) -> int:
    return int(id_.partition(b"-")[0])


def _failure(error: Exception, text: str) -> Failure:
    for word, failure in _FAILURES_BY_TEXT.items():
        if word in text:
            return failure
    for classes, failure in _FAILURES_BY_CLASS:
        if isinstance(error, classes):
            return failure
    return Failure.REPLY
