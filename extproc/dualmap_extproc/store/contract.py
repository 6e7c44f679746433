"""What a store of shared state does, as the exchange asks it and ``memory`` and ``redis`` answer.

A store keeps two things per pool: a stream of news entries, each forgotten after a while, and one binding per session,
forgotten when it is not refreshed. It never decides anything but which of two bindings holds (``dualmap.news``).
Replicas share no clock, so everything that comes out of a store has an age by the store's clock.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

from dualmap.news import News, SharedBinding

HISTORY_ENTRIES_MAX: Final = 4096
"""The most entries that a replica without a cursor reads back: a minute of about seven busy routers."""


class Failure(StrEnum):
    """Why a store did not do what it was asked."""

    CONNECTION = "connection"
    TIMEOUT = "timeout"
    DENIED = "denied"
    FULL = "full"
    READ_ONLY = "read_only"
    REPLY = "reply"


class StoreError(Exception):
    """A store did not do what it was asked; it may at the next try. The message is for people and names no secret."""

    def __init__(self, failure: Failure, message: str) -> None:
        self.failure = failure
        super().__init__(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a replica wants to hear about a pool (``namespace/name``).

    ``cursor`` is where its last answer ended; without one it is told what is at most ``window_s`` old. ``wanted`` are
    sessions whose bindings it wants.
    """

    pool: str
    window_s: float
    cursor: str | None = None
    wanted: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What the replica ``peer`` told ``age_s`` seconds ago. ``wanted`` of its news is always empty."""

    peer: str
    news: News
    age_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a store has to a Question: entries of other replicas, oldest first, and the bindings it knows.

    ``unreadable`` counts entries and bindings that were left out because they are not what a router wrote.
    """

    cursor: str
    entries: tuple[Entry, ...]
    bindings: tuple[SharedBinding, ...]
    unreadable: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Bindings that a replica wants to hold, at most one per session; those that do are kept for ``ttl_s``."""

    pool: str
    ttl_s: float
    bindings: tuple[SharedBinding, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Post:
    """News for the other replicas of a pool, kept for at least ``keep_s``; what it wants is not part of it."""

    pool: str
    keep_s: float
    news: News


class Store(Protocol):
    """Keeps what replicas tell each other. Every method raises StoreError, and in bounded time."""

    async def hear(self, peer: str, questions: Sequence[Question]) -> tuple[Answer, ...]:
        """Answer each question; what ``peer`` itself told is left out."""

    async def settle(self, claims: Sequence[Claim]) -> tuple[tuple[SharedBinding, ...], ...]:
        """Return for each binding of each claim the one that holds from now on: itself, or the one it lost to.

        The higher version holds; of the same version the one taken first, whose tokens and time to live are renewed
        when it is claimed again for the same host.
        """

    async def publish(self, peer: str, posts: Sequence[Post]) -> None:
        """Append news of ``peer`` to the streams of their pools."""

    async def close(self) -> None:
        """Let go of connections."""
