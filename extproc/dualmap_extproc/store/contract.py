"""The interface of a store of shared state; ``memory`` and ``redis`` implement it, and ``exchange`` uses it.

A store keeps this data for each pool:

- A stream of replication updates, kept for minutes, which a starting replica reads.

- The last loads of each replica: each message is complete, and expires after seconds.

- The last demand report of each replica, which expires after a minute (``dualmap.scaling.reports``).

- One binding per session, which expires unless a replica renews it.

If two replicas write a binding of the same session, the store decides which binding is valid
(``dualmap.replicas.update``). The store makes no other decision. Replicas have different clocks, so each value from a
store has an age by the store's clock.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

from dualmap.replicas.update import ReplicaUpdate, SharedBinding, SharedLoad
from dualmap.scaling.reports import Report

HISTORY_ENTRIES_MAX: Final = 32_768
"""The approximate number of updates that a store keeps for a pool: five minutes of ten busy routers."""
PAGE_ENTRIES: Final = 16
"""The most updates in an answer: the router decodes this number in 3 ms, during which requests wait."""


class Failure(StrEnum):
    """Why a call to the store failed."""

    CONNECTION = "connection"
    TIMEOUT = "timeout"
    DENIED = "denied"
    FULL = "full"
    READ_ONLY = "read_only"
    REPLY = "reply"


class StoreError(Exception):
    """A call of the store failed; a later call may succeed. The message is for people and contains no secret."""

    def __init__(self, failure: Failure, message: str) -> None:
        self.failure = failure
        super().__init__(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A replica's query about a pool (``namespace/name``).

    ``cursor`` is the end of the replica's last answer. Without a cursor, the answer starts with entries that are at
    most ``window_s`` seconds old. ``wanted`` lists the sessions with the bindings that the replica requests.
    """

    pool: str
    window_s: float
    cursor: str | None = None
    wanted: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """An update that the replica ``peer`` wrote ``age_s`` seconds ago. Its ``wanted`` and ``loads`` are empty."""

    peer: str
    update: ReplicaUpdate
    age_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadEntry:
    """All loads that the replica ``peer`` wrote ``age_s`` seconds ago."""

    peer: str
    loads: Mapping[str, SharedLoad]
    age_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportEntry:
    """The demand on the pool that the replica ``peer`` reported ``age_s`` seconds ago."""

    peer: str
    report: Report
    age_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer to a Question: at most PAGE_ENTRIES updates of other replicas, oldest first, and stored bindings.

    ``more`` is true if the store has further updates to read immediately. ``loads`` contains each replica's last loads
    if the replica wrote them since the last answer and less than PEER_TTL_S ago (``dualmap.replicas.peers``).
    ``reports`` contains each replica's last report if the replica wrote it since the last answer and less than
    REMEMBERED_S ago (``dualmap.scaling.reports``). ``unreadable`` is the number of invalid entries and bindings, which
    the answer omits. ``oversized`` is the part of this number that the store removed because of its size.
    """

    cursor: str
    entries: tuple[Entry, ...]
    loads: tuple[LoadEntry, ...]
    reports: tuple[ReportEntry, ...]
    bindings: tuple[SharedBinding, ...]
    more: bool = False
    unreadable: int = 0
    oversized: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Bindings that a replica claims, at most one per session; the store keeps the valid bindings for ``ttl_s``."""

    pool: str
    ttl_s: float
    bindings: tuple[SharedBinding, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Post:
    """A replica's publication about a pool; fields that the replica does not publish now are None.

    The store keeps ``update`` for at least ``keep_s``, without its loads and wanted sessions. ``loads`` and ``report``
    replace the replica's earlier loads and report.
    """

    pool: str
    keep_s: float
    update: ReplicaUpdate | None = None
    loads: Mapping[str, SharedLoad] | None = None
    report: Report | None = None


class Store(Protocol):
    """A store of the state that replicas share. Every method returns or raises StoreError within bounded time."""

    async def read(self, peer: str, questions: Sequence[Question]) -> tuple[Answer, ...]:
        """Return the answer to each question, without entries of ``peer`` itself."""

    async def resolve(self, claims: Sequence[Claim]) -> tuple[tuple[SharedBinding, ...], ...]:
        """Return the valid binding for each claim: the claimed binding, or a binding of another replica.

        The binding with the higher version is valid; with equal versions, the binding that was stored first. A claim
        for the same host renews the stored binding's tokens and time to live.
        """

    async def publish(self, peer: str, posts: Sequence[Post]) -> None:
        """Publish the posts of ``peer`` to the other replicas."""

    async def close(self) -> None:
        """Close connections."""
