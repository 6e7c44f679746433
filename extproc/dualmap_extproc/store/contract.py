"""What a store of shared state does, as the exchange asks it and ``memory`` and ``redis`` answer.

A store keeps four things per pool: a stream of news, kept for minutes so that a replica that starts can read it back;
what each replica last said of its load, which is whole each time and worthless after seconds; what each last reported
of the demand, which matters for a minute (``dualmap.scaling.shares``); and one binding per session, forgotten when
it is not refreshed. It never decides anything but which of two bindings holds
(``dualmap.replicas.update``). Replicas share no clock, so everything that comes out of a store has an age by the
store's clock.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

from dualmap.replicas.update import ReplicaUpdate, SharedBinding, SharedLoad
from dualmap.scaling.shares import Report

HISTORY_ENTRIES_MAX: Final = 32_768
"""About the most entries of news that are kept of a pool: five minutes of ten busy routers."""
PAGE_ENTRIES: Final = 16
"""The most entries of news in an answer: to unpack them takes 3 ms, in which requests have to wait."""


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
    """What the replica ``peer`` told ``age_s`` seconds ago. ``wanted`` and ``loads`` of its news are always empty."""

    peer: str
    update: ReplicaUpdate
    age_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadEntry:
    """What the replica ``peer`` said of its load ``age_s`` seconds ago; as in ReplicaUpdate it is whole."""

    peer: str
    loads: Mapping[str, SharedLoad]
    age_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportEntry:
    """What the replica ``peer`` reported of the pool's demand ``age_s`` seconds ago; as in Report it is whole."""

    peer: str
    report: Report
    age_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a store has to a Question: at most PAGE_ENTRIES of other replicas, oldest first, and the bindings it knows.

    ``more`` says that there are further entries to ask for at once. ``loads`` are the last words of each replica that
    has said anything since the last answer and less than PEER_TTL_S ago (``dualmap.replicas.peers``), ``reports``
    likewise, less
    than REMEMBERED_S ago (``dualmap.scaling.shares``). ``unreadable`` counts entries and bindings that were left out
    because they are not what a router wrote.
    """

    cursor: str
    entries: tuple[Entry, ...]
    loads: tuple[LoadEntry, ...]
    reports: tuple[ReportEntry, ...]
    bindings: tuple[SharedBinding, ...]
    more: bool = False
    unreadable: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Bindings that a replica wants to hold, at most one per session; those that do are kept for ``ttl_s``."""

    pool: str
    ttl_s: float
    bindings: tuple[SharedBinding, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Post:
    """What a replica has to tell the others of a pool; None is what it does not speak of now.

    ``news`` is kept for at least ``keep_s``; its loads and what it wants are no part of it. ``loads`` and ``report``
    take the place of those told before.
    """

    pool: str
    keep_s: float
    update: ReplicaUpdate | None = None
    loads: Mapping[str, SharedLoad] | None = None
    report: Report | None = None


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
        """Tell the other replicas what ``peer`` has to tell."""

    async def close(self) -> None:
        """Let go of connections."""
